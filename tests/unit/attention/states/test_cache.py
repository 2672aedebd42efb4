from __future__ import annotations

import numpy as np
import torch

from tests.fakes.states import MAX_SEQS, SHAPE, make_cache

CPU = torch.device("cpu")


def test_rows_begin_with_snapshots_or_without_a_state() -> None:
    """Several rows with one snapshot; the other states stay as they are."""
    cache = make_cache(SHAPE, torch.float32, CPU)
    before = cache.recurrent.clone(), cache.inputs.clone()
    cache.begin(np.asarray([4, 0, 2, 5], np.int32), np.asarray([1, -1, 1, 2], np.int32))
    for states, old in zip((cache.recurrent, cache.inputs), before, strict=True):
        first = MAX_SEQS + 1
        assert torch.equal(states[4], old[first + 1])
        assert torch.equal(states[2], old[first + 1])
        assert torch.equal(states[5], old[first + 2])
        assert not states[0].any()
        for kept in (1, 3, *range(MAX_SEQS, len(states))):
            assert torch.equal(states[kept], old[kept])


def test_without_snapshots_no_row_has_a_state() -> None:
    cache = make_cache(SHAPE, torch.float32, CPU)
    cache.begin(np.asarray([1], np.int32), np.empty(0, np.int32))
    assert not cache.recurrent[1].any()
    assert cache.recurrent[2].any()


def test_states_are_zeros_after_sleep() -> None:
    cache = make_cache(SHAPE, torch.float32, CPU)
    assert cache.num_bytes == cache.recurrent.nbytes + cache.inputs.nbytes
    assert cache.mapped_bytes == 0  # of a GPU
    address = cache.recurrent.data_ptr()
    cache.release()
    cache.restore()
    cache.restore()
    assert not cache.recurrent.any()
    assert not cache.inputs.any()
    assert cache.recurrent.data_ptr() == address
