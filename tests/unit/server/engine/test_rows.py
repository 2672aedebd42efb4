from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toka_async.arrays import EMPTY, f32_column, i32_column
from toka_async.messages import Reason, Tokens
from toka_async.server.engine.rows import TokenBlock, join, merged, split, split_requests


def tokens(num_logprobs: int) -> Tokens:
    width = max(num_logprobs, 0)
    return Tokens(
        request_ids=i32_column([7, 8, 7]),
        samples=i32_column([0, 5, 1]),
        counts=i32_column([2, 0, 3]),
        reasons=i32_column([0, 2, 1]),
        token_ids=i32_column([10, 11, 12, 13, 14]),
        num_logprobs=num_logprobs,
        logprobs=f32_column([-float(i) for i in range(5)]) if num_logprobs >= 0 else memoryview(b""),
        top_ids=i32_column(range(5 * width)),
        top_logprobs=f32_column([float(i) for i in range(5 * width)]),
    )


def test_rows_are_cut_out() -> None:
    first, second, third = split(tokens(2), lambda _: True)
    assert (first[:2], second[:2], third[:2]) == ((7, 0), (8, 5), (7, 1))
    assert [row[3] for row in (first, second, third)] == [Reason.NONE, Reason.LENGTH, Reason.STOP]
    assert [len(row[2]) for row in (first, second, third)] == [2, 0, 3]
    assert third[2].token_ids.tolist() == [12, 13, 14]
    assert third[2].logprobs.tolist() == [-2.0, -3.0, -4.0]
    assert third[2].top_ids.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert third[2].top_logprobs.dtype == np.float32


def test_rows_of_other_requests_are_left_out() -> None:
    (place,) = [row[:2] for row in split(tokens(2), lambda request_id: request_id == 8)]
    assert place == (8, 5)


def test_rows_without_logprobs() -> None:
    for num_logprobs, num_chosen in ((-1, 0), (0, 3)):
        *_, (_, _, rows, _) = split(tokens(num_logprobs), lambda _: True)
        assert rows.logprobs.shape == (num_chosen,)
        assert rows.top_ids.shape == (3, 0)


def test_join_and_part() -> None:
    (_, _, first, _), _, (_, _, third, _) = split(tokens(1), lambda _: True)
    joined = join([first, third])
    assert joined.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert joined.top_ids.tolist() == [[0], [1], [2], [3], [4]]
    assert joined.part(1, 3).logprobs.tolist() == [-1.0, -2.0]
    assert join([third]) is third
    assert len(join([])) == 0


def whole(block: TokenBlock) -> dict[int, tuple[list[int], int]]:
    """Tokens and reason by sample."""
    rows = np.split(block.token_ids, np.cumsum(block.counts)[:-1])
    return {
        int(sample): (row.tolist(), int(reason))
        for sample, row, reason in zip(block.samples, rows, block.reasons, strict=True)
    }


def test_blocks_of_requests() -> None:
    blocks = dict(split_requests(tokens(-1), lambda _: True))
    assert whole(blocks[7]) == {0: ([10, 11], 0), 1: ([12, 13, 14], 1)}
    assert whole(blocks[8]) == {5: ([], 2)}
    nothing = Tokens(request_ids=EMPTY, samples=EMPTY, counts=EMPTY, reasons=EMPTY, token_ids=EMPTY)
    assert not list(split_requests(nothing, lambda _: True))
    assert [request_id for request_id, _ in split_requests(tokens(-1), lambda request_id: request_id == 8)] == [8]


@given(
    arrivals=st.lists(
        st.dictionaries(st.integers(0, 4), st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_merged_blocks_have_all_tokens_in_order(arrivals: list[dict[int, list[int]]]) -> None:
    expected: dict[int, list[int]] = {}
    blocks = []
    for arrival in arrivals:
        for sample, ids in arrival.items():
            expected.setdefault(sample, []).extend(ids)
        blocks.append(
            TokenBlock(
                np.array(list(arrival), np.int32),
                np.array([len(ids) for ids in arrival.values()], np.int32),
                np.array([i for ids in arrival.values() for i in ids], np.int32),
                np.full(len(arrival), 2 if arrival is arrivals[-1] else 0, np.int32),
            )
        )
    one = merged(blocks)
    assert one.samples.tolist() == sorted(expected)
    last = arrivals[-1]
    assert whole(one) == {sample: (ids, 2 if sample in last else 0) for sample, ids in expected.items()}
