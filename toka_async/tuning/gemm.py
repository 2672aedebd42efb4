"""Has a GPU's products with the model's matrices tuned, for the numbers of rows that steps have.

Knows which matrices a decoder has and what earlier starts chose for them; how algorithms are found and chosen is in
`kernels.matmul` and `kernels.gated`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from toka_async.checkpoint.limits import RankLimits
from toka_async.kernels.cublaslt import CublasLt
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts, Tile
from toka_async.kernels.matmul import TunedProducts
from toka_async.kernels.trial import event_clock, tuned_sizes
from toka_async.model.decoder import MLP, Decoder
from toka_async.model.layers import ColumnLinear, RowLinear, VocabularyMatrix
from toka_async.runner.graphs import graph_sizes
from toka_async.tuning.store import TuningCache

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
_MOST_WEIGHTS = 8  # of a shape that are used in turn
_GATED_SIZES = (128, 256, 512, 1024, 2048, 4096)
_COPIES_TENSORS = (9, 0)  # compute capability of GPUs that do


def make_ops(device: torch.device, dtype: torch.dtype, tuned: bool) -> FusedOps:
    """Whose products can be tuned, as far as this GPU and dtype admit."""
    if not tuned or dtype not in DTYPES:
        return FusedOps()
    gates: GatedProducts | None = None
    if torch.cuda.get_device_capability(device) >= _COPIES_TENSORS:
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        gates = GatedProducts(event_clock, num_programs)
    return FusedOps(_make_products(device), gates)


def _make_products(device: torch.device) -> TunedProducts | None:
    """None where there is no cuBLASLt."""
    try:
        return TunedProducts(CublasLt(device), event_clock)
    except (OSError, AttributeError) as error:
        logger.warning("compile.tune: cuBLASLt cannot be used here (%s); torch chooses algorithms", error)
        return None


class ProductTuning:
    """Of one process' operations; what was tuned at an earlier start is found in the cache."""

    def __init__(self, ops: FusedOps, cache: TuningCache) -> None:
        self._ops = ops
        self._cache = cache

    @torch.inference_mode()
    def tune(self, decoder: Decoder, limits: RankLimits, max_graph_seqs: int, show: Callable[[int, int], None]) -> None:
        """Tune for steps of up to the limits; graphs' numbers of rows each for itself. show: (shapes done, all)."""
        graphs = graph_sizes(min(max_graph_seqs, limits.max_seqs)) if max_graph_seqs else []
        matrices = _matrices(decoder) if self._ops.products is not None else {}
        gates = _gates(decoder) if self._ops.gates is not None else {}
        total = len(matrices) + len(gates)
        for done, ((_, adds, most_seqs), weights) in enumerate(matrices.items()):
            assert self._ops.products is not None
            show(done, total)
            most = limits.max_seqs if most_seqs else limits.max_tokens
            self._tune_products(self._ops.products, weights[:_MOST_WEIGHTS], adds, tuned_sizes(graphs, most))
        for done, ((_, activation), weights) in enumerate(gates.items(), len(matrices)):
            assert self._ops.gates is not None
            show(done, total)
            self._tune_gates(self._ops.gates, weights[:_MOST_WEIGHTS], activation, gated_sizes(limits.max_tokens))
            ranges = ", ".join(f"{first} to {last}" for first, last in self._ops.gates.ranges())
            logger.info("gated products: in one kernel for %s rows", ranges or "no")
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def tune_layers(self, decoder: Decoder, sizes: Sequence[int]) -> None:
        """Tune for steps of just so many tokens, layers alone; nothing is found or kept."""
        for (_, adds, most_seqs), weights in _matrices(decoder).items() if self._ops.products is not None else ():
            if not most_seqs:
                assert self._ops.products is not None
                self._ops.products.tune(weights, adds, sizes)
        for (_, activation), weights in _gates(decoder).items() if self._ops.gates is not None else ():
            assert self._ops.gates is not None
            self._ops.gates.tune(weights, activation, sizes, partial(_separately, self._ops, activation))

    def _tune_products(
        self, products: TunedProducts, weights: Sequence[Tensor], adds: bool, sizes: Sequence[int]
    ) -> None:
        facts = {**_facts(weights, sizes), "adds": adds, "library": products.library_version}
        known = self._cache.find("product", facts, list[list[int] | None])
        if known is None or not products.adopt(weights[0], adds, sizes, known):
            products.tune(weights, adds, sizes)
            self._cache.keep("product", facts, products.chosen(weights[0], adds))

    def _tune_gates(
        self, gates: GatedProducts, weights: Sequence[Tensor], activation: str, sizes: Sequence[int]
    ) -> None:
        library = None if self._ops.products is None else self._ops.products.library_version
        facts = {**_facts(weights, sizes), "activation": activation, "library": library}
        known = self._cache.find("gated-product", facts, list[Tile | None])
        if known is None or not gates.adopt(weights[0], activation, sizes, known):
            gates.tune(weights, activation, sizes, partial(_separately, self._ops, activation))
            if (chosen := gates.chosen(weights[0], activation)) is not None:
                self._cache.keep("gated-product", facts, chosen)


def _facts(weights: Sequence[Tensor], sizes: Sequence[int]) -> dict[str, object]:
    """What the fastest ways depend on: how many weights are used in turn says whether they stay in caches."""
    weight = weights[0]
    return {"shape": list(weight.shape), "dtype": str(weight.dtype), "weights": len(weights), "sizes": list(sizes)}


def gated_sizes(most: int) -> list[int]:
    """Rows to tune gated products for: the more rows, the more alike; and the most take their time."""
    return [*(size for size in _GATED_SIZES if size < most), most]


def _separately(ops: FusedOps, activation: str, x: Tensor, weight: Tensor) -> Tensor:
    return ops.gate(ops.linear(x, weight), activation)


def _gates(decoder: Decoder) -> dict[tuple[tuple[int, ...], str], list[Tensor]]:
    """Matrices whose product is gated, by their shape and activation."""
    found: dict[tuple[tuple[int, ...], str], list[Tensor]] = {}
    for module in decoder.modules():
        if isinstance(module, MLP) and module.gate_up.bias is None:
            weight = module.gate_up.weight
            found.setdefault((tuple(weight.shape), module.activation), []).append(weight)
    return found


def _matrices(decoder: Decoder) -> dict[tuple[tuple[int, ...], bool, bool], list[Tensor]]:
    """Matrices by their shape, whether products with them are added, and whether sampled rows alone go through them."""
    found: dict[tuple[tuple[int, ...], bool, bool], list[Tensor]] = {}
    for module in decoder.modules():
        if isinstance(module, ColumnLinear) and module.bias is None:
            key = tuple(module.weight.shape), False, False
        elif isinstance(module, RowLinear) and module.bias is None:
            key = tuple(module.weight.shape), module.adds, False
        elif isinstance(module, VocabularyMatrix) and module is decoder.head:
            key = tuple(module.weight.shape), False, True
        else:
            continue
        found.setdefault(key, []).append(module.weight)
    return found
