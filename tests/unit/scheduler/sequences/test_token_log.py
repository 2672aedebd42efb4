from __future__ import annotations

import numpy as np
import pytest

from tests.cases.columns import ids
from toka_async.arrays import Float32, Int32
from toka_async.scheduler.sequences.token_log import BLOCK, TokenLog


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
    taken, tokens, logprobs = log.take(seqs)
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
    assert log.take(ids(0))[2].tolist() == [0.0]


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3])
def test_a_restored_log_goes_on(count: int) -> None:
    log = TokenLog(2)
    tokens = np.arange(count, dtype=np.int32)
    log.restore(1, tokens, floats(tokens))
    log.append(ids(0, 1), ids(5, count), None)
    log.check()
    assert log.tail(1, 2).tolist() == list(range(count + 1))[-2:]
    assert log.take(ids(1))[1].tolist() == list(range(count + 1))
    assert log.take(ids(0))[1].tolist() == [5]


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
    assert log.take(ids(0))[1].tolist() == [0, 1, 2, 3]
    assert log.take(ids(4))[1].tolist() == [9]
