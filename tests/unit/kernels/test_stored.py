"""What is stored in E4M3 is copied as the same numbers of another dtype; casts to it: test_append.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from toka_async.kernels.stored import widen_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [5, 64])
@pytest.mark.parametrize("num_programs", [1, 2, 9])
def test_listed_pages_are_copied(dtype: torch.dtype, page_size: int, num_programs: int) -> None:
    shape = 7, 2, page_size, 48
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator).to(DEVICE).view(torch.float8_e4m3fn)
        for _ in range(2)
    )
    wide_keys, wide_values = (torch.full((4, *shape[1:]), -1, dtype=dtype, device=DEVICE) for _ in range(2))
    table = torch.tensor([[0, 0, 0, 0], [6, 1, 4, 0], [3, 2, 5, 0]], dtype=torch.int32, device=DEVICE)[:, :3]
    slots = torch.tensor([0, 2, 1], device=DEVICE)
    sources = torch.tensor([[3, 0], [2, 0], [2, 2], [1, 1], [1, 0]], dtype=torch.int32, device=DEVICE)
    widen_pages(keys, values, table, slots, sources, wide_keys, wide_values, num_programs)
    for wide, narrow in ((wide_keys, keys), (wide_values, values)):
        assert torch.equal(wide[:3].float(), narrow.float()[[6, 4, 2]])
        assert wide[3].eq(-1).all()
