from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from toka_async.attention.kv_cache import E4M3
from toka_async.kernels.append import append

EPS = 1e-3  # large, so that leaving it out shows
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        turned: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device, self.dtype = device, dtype
        self.num_heads, self.kv_heads, self.page_size = heads, kv_heads, page_size
        self.turned = turned or dim
        self.heads = self.normal(5, heads + 2 * kv_heads, dim)
        angles = 3 * torch.randn((5, 1, self.turned // 2), generator=self.generator)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        self.rotation = cos.to(device, dtype), sin.to(device, dtype)
        self.weight = self.normal(heads + kv_heads, dim)
        self.keys = self.normal(8, kv_heads, page_size, dim)
        self.values = self.normal(8, kv_heads, page_size, dim)
        self.indices = torch.randperm(8 * page_size, generator=self.generator)[:5].to(device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def expected(self, norm: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values after the append, float32."""
        heads, value = torch.split(self.heads.float(), [self.num_heads + self.kv_heads, self.kv_heads], 1)
        if norm:
            heads = F.rms_norm(heads, heads.shape[-1:], eps=EPS) * self.weight.float()
        cos, sin = (factor.float() for factor in self.rotation)
        turned, others = heads.tensor_split([self.turned], -1)
        heads = torch.cat([turned * cos + turned.roll(self.turned // 2, -1) * sin, others], -1)
        query, key = torch.split(heads, [self.num_heads, self.kv_heads], 1)
        pages, offsets = self.indices // self.page_size, self.indices % self.page_size
        keys, values = self.keys.float(), self.values.float()
        keys[pages, :, offsets], values[pages, :, offsets] = key, value
        return query, keys, values

    def check(self, norm: bool) -> None:
        expected = self.expected(norm)
        weight = self.weight if norm else None
        query = append(self.heads, self.rotation, self.keys, self.values, self.indices, weight, EPS)
        tolerance = TOLERANCE[self.dtype]
        for actual, exact in zip((query, self.keys, self.values), expected, strict=True):
            assert actual.dtype == self.dtype
            torch.testing.assert_close(actual.float(), exact, atol=tolerance, rtol=tolerance)
        assert torch.equal(self.values.float(), expected[2])  # moved, not computed with


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8, 1), (6, 2, 16, 5), (4, 1, 80, 16), (14, 2, 64, 64)], ids=str)
def test_equals_plain_torch(device: torch.device, shape: tuple[int, int, int, int], norm: bool) -> None:
    Case(*shape, device, torch.float32).check(norm)


def test_turns_a_part_of_each_head_among_other_columns(device: torch.device) -> None:
    """Of 16 dimensions 6 turn; a token's heads are a part of its projection."""
    case = Case(4, 2, 16, 5, device, torch.float32, turned=6)
    wide = torch.cat([case.normal(5, 3, 16), case.heads], 1)
    case.heads = wide[:, 3:]
    case.check(norm=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device: torch.device, dtype: torch.dtype) -> None:
    Case(8, 2, 64, 16, device, dtype).check(norm=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_with_float32_weights_rounds_once(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(8, 2, 64, 16, device, dtype)
    case.weight = 1 + torch.randn(10, 64, generator=case.generator).to(device) / 512
    case.check(norm=True)
    still = torch.ones_like(case.rotation[0]), torch.zeros_like(case.rotation[1])
    query = append(case.heads, still, case.keys, case.values, case.indices, case.weight, EPS)
    wide = case.heads[:, :8].float()
    exact = (F.rms_norm(wide, (64,), eps=EPS) * case.weight[:8]).to(dtype)
    # The interpreter truncates to bfloat16.
    torch.testing.assert_close(query, exact, atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stores_e4m3_with_scales(device: torch.device, dtype: torch.dtype) -> None:
    """The nearest of what is written divided by its scale; what is beyond saturates."""
    case = Case(4, 2, 16, 4, device, dtype)
    case.heads[0] *= 1e4
    exact = case.keys.clone(), case.values.clone()
    append(case.heads, case.rotation, *exact, case.indices, case.weight, EPS)
    keys, values = case.keys.to(E4M3), case.values.to(E4M3)
    query = append(case.heads, case.rotation, keys, values, case.indices, case.weight, EPS, (0.25, 4.0))
    assert query.dtype == dtype
    pages, offsets = case.indices // 4, case.indices % 4
    for stored, plain, scale in ((keys, exact[0], 0.25), (values, exact[1], 4.0)):
        expected = (plain[pages, :, offsets].float() / scale).clamp(-448, 448)
        assert torch.equal(stored.float()[pages, :, offsets], expected.to(E4M3).float())
    assert values.float().abs().max() == 448


def test_no_tokens(device: torch.device) -> None:
    case = Case(4, 2, 16, 4, device, torch.float32)
    before = case.keys.clone()
    rotation = case.rotation[0][:0], case.rotation[1][:0]
    query = append(case.heads[:0], rotation, case.keys, case.values, case.indices[:0])
    assert query.shape == (0, 4, 16)
    assert torch.equal(case.keys, before)
