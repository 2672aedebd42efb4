from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.columns import ids
from toka_async.arrays import Float32, Int32
from toka_async.scheduler.sequences.token_log import BLOCK, TokenColumns, TokenLog


def floats(values: Int32) -> Float32:
    return (-values / 8).astype(np.float32)


def filled(counts: list[int]) -> TokenLog:
    """A log whose sequence i has tokens 1000 i, 1000 i + 1, …"""
    log = TokenLog(len(counts))
    for k in range(max(counts)):
        seqs = np.flatnonzero(np.asarray(counts) > k).astype(np.int32)
        tokens = (seqs * 1000 + k).astype(np.int32)
        log.append(seqs, tokens, floats(tokens))
        log.check()
    return log


def test_take_gives_every_sequence_its_tokens_in_order() -> None:
    counts = [3, 0, BLOCK, BLOCK + 1, 3 * BLOCK - 1]
    log = filled(counts)
    seqs = ids(4, 2, 1, 0)
    taken, columns = log.take(seqs)
    tokens, logprobs = columns.token_ids, columns.logprobs
    assert taken.tolist() == [counts[seq] for seq in seqs]
    assert tokens.tolist() == [1000 * seq + k for seq in seqs.tolist() for k in range(counts[seq])]
    assert logprobs.tolist() == floats(tokens).tolist()
    assert log.count.tolist() == [0, 0, 0, BLOCK + 1, 0]
    log.check()


def test_blocks_are_used_again() -> None:
    log = TokenLog(2)
    for _ in range(3):
        for k in range(2 * BLOCK):
            log.append(ids(0, 1), ids(k, k), None)
        size = log._tokens.shape[0]
        log.take(ids(0, 1))
    assert log._tokens.shape[0] == size == 4


def test_absent_logprobs_are_zeros_where_others_lay_before() -> None:
    log = TokenLog(1)
    log.append(ids(0), ids(7), np.asarray([-3.0], np.float32))
    log.take(ids(0))
    log.append(ids(0), ids(8), None)
    assert log.take(ids(0))[1].logprobs.tolist() == [0.0]


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3])
def test_a_restored_log_goes_on(count: int) -> None:
    log = TokenLog(2)
    tokens = np.arange(count, dtype=np.int32)
    log.restore(1, TokenColumns(tokens, floats(tokens)))
    log.append(ids(0, 1), ids(5, count), None)
    log.check()
    assert log.tail(1, 2).tolist() == list(range(count + 1))[-2:]
    assert log.take(ids(1))[1].token_ids.tolist() == list(range(count + 1))
    assert log.take(ids(0))[1].token_ids.tolist() == [5]


@pytest.mark.parametrize("count", [0, 1, 2, BLOCK, BLOCK + 2, 1000])
def test_tail_is_the_newest_tokens(count: int) -> None:
    log = filled([0, 2 * BLOCK + 1])
    tokens = list(range(1000, 1000 + 2 * BLOCK + 1))
    assert log.tail(1, count).tolist() == tokens[max(0, len(tokens) - count) :]
    assert log.tail(0, count).tolist() == []
    assert log.take(ids(1))[0].tolist() == [2 * BLOCK + 1]  # looking takes nothing


def test_more_sequences_keep_what_is_there() -> None:
    log = filled([3])
    log.resize(5)
    log.append(ids(4, 0), ids(9, 3), None)
    assert log.take(ids(0))[1].token_ids.tolist() == [0, 1, 2, 3]
    assert log.take(ids(4))[1].token_ids.tolist() == [9]


def test_what_filters_keep_is_kept_from_the_first_that_comes() -> None:
    log = TokenLog(2)
    log.append(ids(0, 1), ids(1, 2), None)
    log.append(ids(0), ids(3), np.asarray([-1.0], np.float32), ids(9), np.asarray([0.5], np.float32))
    log.append(ids(0, 1), ids(4, 5), None)
    log.check()
    counts, columns = log.take(ids(0, 1))
    assert counts.tolist() == [3, 2]
    assert columns.kept.tolist() == [0, 9, 0, 0, 0]
    assert columns.masses.tolist() == [1, 0.5, 1, 1, 1]
    log.append(ids(0), ids(6), None)
    log.append(ids(0), ids(7), None)
    assert log.take(ids(0))[1].kept.tolist() == [0, 0]
    assert log.take(ids(1), scored=False)[1].kept.size == 0


def list_versions(columns: TokenColumns, counts: Int32) -> list[list[str]]:
    """The version of each token of each row, as spans say."""
    rows = []
    for row, count in enumerate(counts.tolist()):
        versions: list[str] = []
        for end, version in columns.spans.get(row, ()):
            versions += [version] * (end - len(versions))
        rows.append(versions + [columns.version] * (count - len(versions)))
    return rows


ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.sets(st.integers(0, 3), min_size=1)),
    st.tuples(st.just("change"), st.sampled_from("abc")),
    st.tuples(st.just("take"), st.integers(0, 3)),
    st.tuples(st.just("restore"), st.integers(0, 3)),
    st.tuples(st.just("cut"), st.integers(0, 3), st.integers(1, 5)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_every_token_is_of_the_version_with_which_it_came(actions: list[tuple[str, object]]) -> None:
    log, expected = TokenLog(4), [[] for _ in range(4)]  # type: tuple[TokenLog, list[list[str]]]
    for name, *rest in actions:
        match name, rest:
            case "append", [set() as seqs]:
                log.append(ids(*sorted(seqs)), ids(*sorted(seqs)), None)
                for seq in seqs:
                    expected[seq].append(log.version)
            case "change", [str() as version]:
                log.change_version(version)
            case "restore", [int() as seq]:  # as after a preemption
                _, columns = log.take(ids(seq))
                log.change_version("later")
                log.restore(seq, columns)
            case "cut", [int() as seq, int() as count]:
                _, columns = log.take(ids(seq))
                versions = expected[seq][:count]
                assert list_versions(columns.cut(count), ids(len(versions))) == [versions]
                expected[seq] = []
            case _, [int() as seq]:
                counts, columns = log.take(ids(seq))
                assert list_versions(columns, counts) == [expected[seq]]
                expected[seq] = []
        log.check()
    counts, columns = log.take(ids(0, 1, 2, 3))
    assert list_versions(columns, counts) == expected
