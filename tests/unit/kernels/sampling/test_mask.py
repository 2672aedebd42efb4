from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from toka_async.kernels.sampling.mask import apply_masks
from toka_async.model import penalties
from toka_async.model.sampling import Flag


@pytest.mark.parametrize("vocab", [31, 96, 4100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_forbid_what_torch_forbids(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    words = -(-vocab // 32)
    masks = torch.from_numpy(np.random.default_rng(vocab).integers(-(2**31), 2**31, (4, words)).astype(np.int32))
    logits = torch.randn(3, vocab, generator=generator).to(dtype)
    slots = torch.tensor([2, 0, 3])
    flags = torch.tensor([int(Flag.MASKED), 0, int(Flag.RANDOM), int(Flag.MASKED | Flag.BIASED)], dtype=torch.int32)
    expected = logits.clone()
    penalties.apply_masks(expected, torch.tensor([1, 2]), masks[[0, 3]])
    apply_masks(logits, slots, flags, masks)
    assert torch.equal(logits, expected)
