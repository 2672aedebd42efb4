"""Every attention backend equals the reference in float32, over random shapes; `-s` prints the relative errors."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases.attention import E4M3_SCALED, AttentionCase, make_case
from toka_async.attention.base import AttentionBackend, QueryKeyNorm
from toka_async.attention.blocks import TileLimits
from toka_async.attention.build import NOT_MEASURED, build_attention
from toka_async.attention.choice import ChoiceTable, MeasuredShape, choose_always
from toka_async.attention.kv_cache import CacheFormat, KVCache
from toka_async.attention.reference import ReferenceAttention
from toka_async.attention.triton import TritonChunks
from toka_async.tuning.attention import measure_table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer")

CUDA = torch.device("cuda")
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
E4M3_BOUND = 4e-2
MIXED = replace(
    choose_always("flashinfer"), decode=choose_always("triton").decode, grouped=(MeasuredShape(1, 1, "mixed"),)
)


@dataclass(slots=True, frozen=True)
class Shape:
    page_size: int
    dim: int
    kv_heads: int
    group_size: int
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    is_e4m3: bool = False
    soft_cap: float = 0.0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        window = f" window {self.window}" if self.window else ""
        stored = " in E4M3" if self.is_e4m3 else ""
        cap = f" soft cap {self.soft_cap}" if self.soft_cap else ""
        heads = f"heads {self.kv_heads}x{self.group_size}"
        return f"page {self.page_size} dim {self.dim} {heads} {dtype}{stored}{window}{cap}"


OURS = [
    Shape(1, 64, 2, 1),
    Shape(16, 64, 8, 4),
    Shape(16, 64, 2, 7, window=300),
    Shape(64, 128, 8, 8),
    Shape(16, 128, 2, 4, torch.float16),
    Shape(128, 256, 1, 8),
    Shape(16, 64, 2, 7, torch.float32),
    Shape(64, 128, 1, 4, torch.float32, window=100),
    Shape(16, 64, 8, 4, is_e4m3=True),
    Shape(16, 128, 2, 8, window=300, is_e4m3=True),
    Shape(64, 256, 1, 4, torch.float16, is_e4m3=True),
    Shape(16, 64, 2, 7, torch.float32, is_e4m3=True),
    Shape(16, 512, 1, 8),
    Shape(64, 512, 2, 4, torch.float32),
    Shape(16, 512, 1, 8, is_e4m3=True),
    Shape(16, 256, 4, 2, window=300, soft_cap=3.0),
    Shape(16, 128, 2, 4, soft_cap=3.0),
    Shape(16, 64, 2, 4, torch.float32, soft_cap=3.0),
]
# Each combination of type, head size and with or without a window is compiled, at 20 to 60 seconds: few of them.
FLASHINFERS = [
    Shape(1, 64, 2, 4),
    Shape(16, 64, 8, 4),
    Shape(128, 64, 2, 7),
    Shape(16, 64, 2, 4, window=300),
    Shape(16, 128, 8, 4),
    Shape(64, 128, 1, 8),
    Shape(16, 128, 8, 4, torch.float16),
    Shape(16, 256, 2, 4),
    Shape(16, 64, 8, 4, is_e4m3=True),
    Shape(16, 128, 2, 2, is_e4m3=True),
]
CASES = [("triton", None, shape) for shape in OURS] + [
    pytest.param(backend, table, shape, marks=needs_flashinfer)
    for backend, table in (("flashinfer", None), ("auto", MIXED))
    for shape in FLASHINFERS
]


@dataclass(slots=True)
class Step:
    """What a layer gets, over a case's cache."""

    case: AttentionCase
    projected: Tensor
    rotation: tuple[Tensor, Tensor]
    norm: QueryKeyNorm | None
    soft_cap: float

    def run(self, backend: AttentionBackend) -> Tensor:
        backend.plan(self.case.batch)
        return backend.attend(0, self.projected, self.rotation, self.norm)

    def expected(self, window: int) -> Tensor:
        """The reference in float32, over a copy of the cache."""
        cache = self.case.cache
        shape = 1, cache.num_pages, cache.num_kv_heads, cache.page_size, cache.head_dim
        stored = None if cache.keys[0].dtype == cache.dtype else CacheFormat(cache.keys[0].dtype, cache.scales)
        copy = KVCache(*shape, torch.float32, CUDA, stored=stored)
        copy.keys[0].copy_(cache.keys[0])
        copy.values[0].copy_(cache.values[0])
        limits = TileLimits(slab_bytes=1 << 28)
        backend = ReferenceAttention(copy, self.case.num_heads, (window,), limits=limits, soft_cap=self.soft_cap)
        backend.plan(self.case.batch)
        cos, sin = (factor.float() for factor in self.rotation)
        norm = QueryKeyNorm(self.norm.weight.float(), self.norm.eps) if self.norm else None
        return backend.attend(0, self.projected.float(), (cos, sin), norm)


def make_step(shape: Shape, seed: int, num_groups: int = 6, num_chunks: int = 3, most: int = 3000) -> Step:
    rng = np.random.default_rng(seed)
    most_pages = max(2, 1000 // shape.page_size)
    case = make_case(
        seed,
        shape.page_size,
        shape.kv_heads,
        shape.group_size,
        shape.dim,
        groups=[(int(rng.integers(2, 40)), int(rng.integers(1, most_pages))) for _ in range(num_groups)],
        contexts=[1, *(int(n) for n in rng.integers(1, most, size=5))],
        chunks=[(int(rng.integers(0, most // 2)), int(rng.integers(1, 500))) for _ in range(num_chunks)],
        dtype=shape.dtype,
        device=CUDA,
        stored=E4M3_SCALED if shape.is_e4m3 else None,
    )
    tokens, heads = len(case.query), case.num_heads + shape.kv_heads
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    projected = torch.randn((tokens, heads + shape.kv_heads, shape.dim), generator=generator, device=CUDA)
    angles = 3 * torch.randn((tokens, 1, shape.dim // 2), generator=generator, device=CUDA)
    rotation = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    weight = 1 + 0.1 * torch.randn((heads, shape.dim), generator=generator, device=CUDA)
    norm = QueryKeyNorm(weight.to(shape.dtype), 1e-6) if seed % 2 else None
    cos, sin = (factor.to(shape.dtype) for factor in rotation)
    return Step(case, projected.to(shape.dtype), (cos, sin), norm, shape.soft_cap)


def build(
    backend: Literal["auto", "triton", "flashinfer"], table: ChoiceTable | None, step: Step, window: int
) -> AttentionBackend:
    case, table = step.case, table or NOT_MEASURED
    return build_attention(
        backend, case.cache, case.num_heads, (window,), 1024, 4096, table=table, soft_cap=step.soft_cap
    ).backend


def error(output: Tensor, expected: Tensor) -> float:
    assert output.isfinite().all()
    return float((output.float() - expected).norm() / expected.norm())


@torch.inference_mode()
@pytest.mark.parametrize(("backend", "table", "shape"), CASES, ids=str)
def test_equals_the_reference(
    backend: Literal["auto", "triton", "flashinfer"], table: ChoiceTable | None, shape: Shape
) -> None:
    errors: dict[str, float] = {}
    name = "mixed" if table else backend
    for seed, parts in enumerate(({"num_groups": 0}, {})):
        step = make_step(shape, seed, **parts)
        attention = build(backend, table, step, shape.window)
        expected = step.expected(shape.window)
        errors[f"{seed}"] = error(step.run(attention), expected)
        step.case.batch = replace(step.case.batch, groups=())
        errors[f"{seed} alone"] = error(step.run(attention), expected)
    print(f"\n{name} {shape}: " + " ".join(f"{value:.1e}" for value in errors.values()), end="")
    # A key that lies between two numbers of E4M3 may be rounded to either.
    assert max(errors.values()) < (E4M3_BOUND if shape.is_e4m3 else BOUNDS[shape.dtype]), errors


def steps_ahead(step: Step, backend: AttentionBackend, batches: Sequence[int], busy: bool) -> list[Tensor]:
    """Outputs of steps of the first n decoding rows, all launched while the device is busy with something else."""
    if busy:
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    outputs = []
    batch = step.case.batch
    for count in batches:
        groups = tuple(group for group in batch.groups if group.first_row + group.num_rows <= count)
        backend.plan(
            replace(
                batch,
                num_decode=count,
                query_lengths=batch.query_lengths[:count],
                context_lengths=batch.context_lengths[:count],
                contexts=batch.contexts[:count],
                slots=batch.slots[:count],
                write_indices=batch.write_indices[:count],
                groups=groups,
            )
        )
        rotation = step.rotation[0][:count], step.rotation[1][:count]
        outputs.append(backend.attend(0, step.projected[:count], rotation, step.norm))
        if not busy:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return outputs


@torch.inference_mode()
@pytest.mark.parametrize(
    ("backend", "table"),
    [
        ("triton", None),
        pytest.param("flashinfer", None, marks=needs_flashinfer),
        pytest.param("auto", MIXED, marks=needs_flashinfer),
    ],
    ids=["triton", "flashinfer", "mixed"],
)
def test_steps_launched_ahead_do_not_disturb_each_other(
    backend: Literal["auto", "triton", "flashinfer"], table: ChoiceTable | None
) -> None:
    step = make_step(Shape(16, 64, 8, 4), 1, num_chunks=0)
    attention = build(backend, table, step, 0)
    counts = [step.case.batch.num_decode - 7 * i for i in range(8)]
    expected = steps_ahead(step, attention, counts, busy=False)
    for output, alone in zip(steps_ahead(step, attention, counts, busy=True), expected, strict=True):
        torch.testing.assert_close(output, alone, rtol=0, atol=0)


@torch.inference_mode()
@pytest.mark.parametrize("window", [0, 5000])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_a_few_tokens_after_many_are_split_over_keys(dim: int, window: int) -> None:
    """Beside a chunk that is not; each key is in one part, and parts are merged in float32."""
    case = make_case(0, 16, 2, 4, dim, chunks=[(20_000, 200), (0, 600), (9000, 1)], dtype=torch.bfloat16, device=CUDA)
    part = TritonChunks(case.cache, case.num_heads)
    output = torch.full_like(case.query, torch.nan)
    part.plan(case.batch, window)
    part.run(0, case.query, output)
    assert part.step is not None
    assert part.step.merged is not None
    assert error(output, case.expected(window)) < BOUNDS[torch.bfloat16]


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["triton", pytest.param("auto", marks=needs_flashinfer)])
def test_measuring(backend: Literal["auto", "triton"]) -> None:
    """Few seconds, once compiled; the cache stays as it was; large groups are worth their merge."""
    cache = KVCache(16, 1 << 14, 8, 16, 64, torch.bfloat16, CUDA)
    before = [tensor.normal_().clone() for tensor in (cache.keys[0], cache.values[0])]
    for _ in range(2):
        begin = time.perf_counter()
        built = build_attention(backend, cache, 32, (0,) * 16, max_seqs=8192, max_tokens=32768, choose=measure_table)
        seconds = time.perf_counter() - begin
    assert built.table is not None
    print(f"\n{backend}: measured in {seconds:.1f} s: {built.table.summarize()}\n{built.table}")
    assert all(torch.equal(*pair) for pair in zip(before, (cache.keys[0], cache.values[0]), strict=True))
    assert not any(bool(tensor.any()) for tensor in (*cache.keys[1:], *cache.values[1:]))
    rows, tokens = built.smallest_group
    assert 2 <= rows <= 128
    assert 64 <= tokens <= 4096
    assert built.graphs is built.backend
    assert seconds < 15
