"""Compiles ahead what a start of a model compiles on a GPU, then computes a start's steps, on a GPU that is not there.

`python -m tests.processes.compile_ahead MODEL`, without Triton's interpreter, prints a JSON list: name and hash of each
kernel that was compiled ahead, and of each that a measurement or a step compiled later.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from tests.fakes.offline_gpus import OfflineGpu
from toka_async.attention import build, row_decode
from toka_async.attention.kv_cache import make_cache
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import read_spec
from toka_async.kernels import append, decode, few_rows, fused, prefill
from toka_async.kernels.few_rows import FewRowsProducts
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts
from toka_async.kernels.launches import pdl
from toka_async.messages import Ready
from toka_async.model.weights import build_decoder
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.startup import compile_ahead, layer_trials
from toka_async.startup.warmup import list_gpu_loads, make_largest_load
from toka_async.tuning import few_rows as few_rows_tuning
from toka_async.tuning import gated_tiles
from toka_async.tuning.dense import list_dense_choices
from toka_async.tuning.gemm import ProductTuning
from toka_async.tuning.matrix_group import RowCounts, group_matrices
from toka_async.tuning.product_loads import load_products
from toka_async.tuning.store import TuningCache
from toka_async.tuning.trial import Way

CPU = torch.device("cpu")
PAGE_SIZE = 16
LIMITS = RankLimits(max_seqs=64, max_tokens=256, max_context=1024)


def play_hopper() -> None:
    """Makes kernels those for Hopper chips. No kernel runs, so that new tensors must hold ids that there are."""
    build.resolve_backend = lambda backend, *_: backend
    prefill.is_hopper = lambda _: True  # type: ignore[assignment]
    compile_ahead.has_kernels = lambda _: True  # type: ignore[assignment, attr-defined]
    for module in (append, decode, few_rows, fused):
        module.can_follow = lambda x: len(x) <= pdl.FEW_ROWS  # type: ignore[attr-defined]
    for each in (pdl, row_decode, layer_trials):
        each.list_row_counts = lambda _: [pdl.FEW_ROWS, pdl.FEW_ROWS + 1]  # type: ignore[attr-defined]
    for tuned in (few_rows_tuning, gated_tiles):
        tuned.find_fastest = _run_each  # type: ignore[attr-defined]
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # type: ignore[assignment]
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]


def _run_each(
    ways: Sequence[Way], weights: Sequence[Tensor], operands: Sequence[tuple[Tensor, Tensor]], *_: Any, **__: Any
) -> int:
    for way in ways:
        for x, output in operands:
            way(x, weights[0], output)
    return len(ways) - 1  # one of our kernels, if one suits


def main(model: Path) -> None:
    OfflineGpu(90).install()
    play_hopper()
    compiled: list[tuple[str, str]] = []

    def note(src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append((src.name, metadata["hash"]))

    knobs.compilation.listener = note
    spec = read_spec(model)
    ops = FusedOps(gates=GatedProducts(8), few_rows=FewRowsProducts(1 << 24, 800))
    decoder = build_decoder(spec, torch.bfloat16, CPU, ops=ops)
    for parameter in decoder.parameters():
        parameter.zero_()
    tuning = ProductTuning(ops, TuningCache(None, {}))
    tasks = compile_ahead.list_compile_tasks(spec, torch.bfloat16, torch.bfloat16, CPU, "triton", PAGE_SIZE)
    tasks += tuning.list_builds(decoder, LIMITS)
    with compile_ahead.compile_ahead(tasks, CPU, num_threads=2):
        pass
    ahead = compiled.copy()
    compiled.clear()
    for group in group_matrices(decoder):
        for choice in list_dense_choices(ops, group, RowCounts(LIMITS.max_tokens)):
            choice.use(choice.measure())
    load_products(decoder, LIMITS, torch.bfloat16, CPU)
    cache = make_cache(spec, 513, PAGE_SIZE, torch.bfloat16, CPU)
    attention = build.build_attention(
        "triton", cache, spec.attention.num_heads, spec.windows, LIMITS.max_seqs, LIMITS.max_tokens
    )
    ready = Ready(
        num_pages=512,
        page_size=PAGE_SIZE,
        max_seqs=LIMITS.max_seqs,
        max_context=LIMITS.max_context,
        vocab_size=spec.vocab_size,
        max_tokens=LIMITS.max_tokens,
        group_min_seqs=2,
        group_min_tokens=16,
    )
    runner = Runner(ready, CPU, decoder, cache, attention, SamplingSetup(kernels=True))
    for load in (make_largest_load(ready), *list_gpu_loads(ready)):
        load(runner)
    assert runner.decode is not None
    assert runner.mixed is not None
    with torch.inference_mode():  # as captures do
        runner.decode._decode(4, grouped=False)
        runner.mixed._inputs[4] = runner.mixed._make_inputs(4)
        runner.mixed._begin(4)
    print(json.dumps([ahead, compiled]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
