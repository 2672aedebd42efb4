"""The decoder and the reference backend on a GPU equal themselves on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.models import make_checkpoint
from tests.drivers.paged_rows import PagedRow, make_batch, run_rows
from toka_async.attention.base import PrefixGroup
from toka_async.attention.blocks import TileLimits
from toka_async.attention.kv_cache import KVCache, make_cache
from toka_async.attention.reference import ReferenceAttention
from toka_async.checkpoint.spec import read_spec
from toka_async.model.matrices.ops import Ops, TorchOps
from toka_async.model.weights import build_decoder, load_weights, random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "num_attention_heads": 7, "num_key_value_heads": 1}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("mistral", {"sliding_window": 9}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("mixtral", {"num_local_experts": 5}),
    ("ministral3", {}),
]
PAGE_SIZE = 16


def logits_on(folder: Path, device: torch.device, dtype: torch.dtype, ops: Ops | None = None) -> Tensor:
    spec = read_spec(folder)
    decoder = build_decoder(spec, dtype, device, ops=ops)
    load_weights(decoder, folder)
    cache = make_cache(spec, 30, PAGE_SIZE, dtype, device)
    attention = ReferenceAttention(cache, spec.attention.num_heads, spec.windows)
    rows = [PagedRow(list(range(start, start + 60)), prompt) for start, prompt in ((0, 30), (50, 1), (100, 60))]
    run_rows(decoder, attention, rows, PAGE_SIZE, iter(range(30)))
    return torch.cat([part for row in rows for part in row.logits]).float().cpu()


@pytest.mark.parametrize(("family", "overrides"), CASES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03), (torch.float16, 0.01)])
def test_logits(tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype, error: float) -> None:
    folder = make_checkpoint(tmp_path, family, **overrides)
    exact = logits_on(folder, torch.device("cpu"), torch.float32)
    fused = pytest.importorskip("toka_async.kernels.fused")
    mixture = pytest.importorskip("toka_async.kernels.experts.mixture")
    for ops in (TorchOps(), fused.FusedOps(experts=mixture.ExpertKernels())):
        ours = logits_on(folder, torch.device("cuda"), dtype, ops)
        assert (ours - exact).norm() / exact.norm() < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_rows(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    cache = KVCache(1, 40, 2, PAGE_SIZE, 32, dtype, device)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_(generator=generator)
    rows = [([0, 1, 2, 3, 10 + row], 64 + 1 + row, 1) for row in range(8)] + [([20, 21, 22], 40, 1), ([30, 31], 30, 20)]
    batch = make_batch(rows, 9, PAGE_SIZE, (PrefixGroup(0, 8, 4),), device)
    heads = torch.randn((29, 10, 32), generator=generator, device=device).to(dtype)
    rotation = torch.ones(29, 1, 32, device=device, dtype=dtype), torch.zeros(29, 1, 32, device=device, dtype=dtype)
    outputs = []
    for limits in (TileLimits(shared_bytes=0), TileLimits(shared_bytes=1 << 60)):
        attention = ReferenceAttention(cache, 6, (0,), limits=limits)
        attention.plan(batch)
        assert (attention.plans[0].grouped is None) == (limits.shared_bytes > 0)
        outputs.append(attention.attend(0, heads, rotation).float())
    torch.testing.assert_close(*outputs, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=0)


def test_random_weights_are_made_on_the_device(tmp_path: Path) -> None:
    device = torch.device("cuda")
    decoder = build_decoder(read_spec(make_checkpoint(tmp_path, "qwen3")), torch.bfloat16, device)
    random_weights(decoder, seed=0)
    assert {parameter.device.type for parameter in decoder.parameters()} == {"cuda"}
    assert decoder.embedding is not None
    assert decoder.embedding.weight.float().std().item() == pytest.approx(0.02, rel=0.05)
