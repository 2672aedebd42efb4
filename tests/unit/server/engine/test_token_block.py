from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.requests import make_block, tokens_by_sample
from toka_async.arrays import f32_column, i32_column
from toka_async.messages import Reason, Tokens
from toka_async.server.engine.token_block import (
    LONG_ROWS,
    TokenBlock,
    TokenRows,
    concat_rows,
    join_sample,
    merge_blocks,
    read_rows,
)


def rows(num_logprobs: int) -> TokenRows:
    """Five tokens, as a message brings them."""
    width = max(num_logprobs, 0)
    nothing = memoryview(b"")
    return read_rows(
        Tokens(
            request_ids=nothing,
            samples=nothing,
            counts=nothing,
            reasons=nothing,
            token_ids=i32_column([10, 11, 12, 13, 14]),
            num_logprobs=num_logprobs,
            logprobs=f32_column([-float(i) for i in range(5)]) if num_logprobs >= 0 else nothing,
            top_ids=i32_column(range(5 * width)),
            top_logprobs=f32_column([float(i) for i in range(5 * width)]),
        )
    )


def test_parts_of_tokens() -> None:
    part = rows(2).part(2, 5)
    assert part.token_ids.tolist() == [12, 13, 14]
    assert part.logprobs.tolist() == [-2.0, -3.0, -4.0]
    assert part.top_ids.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert part.top_logprobs.dtype == np.float32
    assert rows(0).part(2, 5).top_ids.shape == (3, 0)
    assert rows(-1).part(2, 5).logprobs.size == 0


def test_parts_are_put_together_again() -> None:
    everything = rows(1)
    again = concat_rows([everything.part(0, 2), everything.part(0, 0), everything.part(2, 5)])
    assert again.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert again.top_ids.tolist() == [[0], [1], [2], [3], [4]]
    assert concat_rows([everything]) is everything
    assert len(concat_rows([])) == 0


ARRIVALS = st.lists(
    st.dictionaries(
        st.tuples(st.integers(0, 2), st.integers(0, 3)), st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6
    ),
    min_size=1,
    max_size=5,
)


def block_of(arrival: dict[tuple[int, int], list[int]], reason: Reason) -> TokenBlock:
    """A block with rows of several keys."""
    block = make_block([(sample, ids, reason) for (_, sample), ids in arrival.items()])
    block.rows[0] = [key for key, _ in arrival]
    return block


@given(arrivals=ARRIVALS)
def test_merged_blocks_have_all_tokens_in_order(arrivals: list[dict[tuple[int, int], list[int]]]) -> None:
    expected: dict[tuple[int, int], list[int]] = {}
    blocks = []
    for arrival in arrivals:
        for place, ids in arrival.items():
            expected.setdefault(place, []).extend(ids)
        blocks.append(block_of(arrival, Reason.LENGTH if arrival is arrivals[-1] else Reason.NONE))
    merged = merge_blocks(blocks, 4)
    assert tokens_by_sample(merged) == expected
    assert list(tokens_by_sample(merged)) == sorted(expected)
    last = [place in arrivals[-1] for place in sorted(expected)]
    assert merged.reasons.astype(bool).tolist() == merged.is_last.tolist() == last


@given(st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=1, max_size=4))
def test_blocks_of_one_sample_are_joined_as_they_are_merged(tokens: list[list[int]]) -> None:
    blocks = [block_of({(0, 0): ids}, Reason.NONE) for ids in tokens[:-1]]
    blocks.append(block_of({(0, 0): tokens[-1]}, Reason.LENGTH))
    joined, merged = join_sample(blocks), merge_blocks(blocks, 1)
    assert joined.rows.tolist() == merged.rows.tolist()
    assert joined.tokens.token_ids.tolist() == merged.tokens.token_ids.tolist()


@given(arrivals=ARRIVALS, data=st.data())
def test_rows_taken_and_cut_out_have_their_tokens(
    arrivals: list[dict[tuple[int, int], list[int]]], data: st.DataObject
) -> None:
    (arrival, *_), places = arrivals, st.permutations([*arrivals[0]])
    block, order = block_of(arrival, Reason.NONE), data.draw(places)
    taken = block.take(np.asarray([list(arrival).index(place) for place in order]))
    assert list(tokens_by_sample(taken).items()) == [(place, arrival[place]) for place in order]
    start = data.draw(st.integers(0, len(order) - 1))
    end = data.draw(st.integers(start + 1, len(order)))
    assert tokens_by_sample(taken.part(start, end)) == {place: arrival[place] for place in order[start:end]}


def test_long_rows_keep_their_tokens() -> None:
    arrival = {(0, sample): [*range(sample, sample + 3 * LONG_ROWS)] for sample in range(3)}
    taken = block_of(arrival, Reason.NONE).take(np.asarray([2, 0]))
    assert tokens_by_sample(taken) == {place: arrival[place] for place in [(0, 2), (0, 0)]}
