"""Tunes a GPU's products with the model's matrices for steps' numbers of rows.

`algorithms` chooses among cuBLASLt's, `gated_tiles` and `few_rows` where our kernels are faster than those.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from toka_async.checkpoint.limits import RankLimits
from toka_async.kernels.cublaslt import CublasLt
from toka_async.kernels.few_rows import ADD, NORMED_DTYPES, STORE, FewRowsProducts, Norm
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts
from toka_async.kernels.matmul import TunedProducts
from toka_async.model.decoder import MLP, Decoder
from toka_async.model.layers import ColumnLinear, RowLinear, VocabularyMatrix
from toka_async.runner.graphs import list_graph_sizes
from toka_async.tuning.algorithms import AlgorithmChoice, list_product_sizes
from toka_async.tuning.few_rows import FewRowsChoice, list_few_rows_sizes
from toka_async.tuning.gated_tiles import GatedTileChoice, list_gated_sizes
from toka_async.tuning.settle import settle
from toka_async.tuning.store import TuningCache

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
_MOST_WEIGHTS = 8  # weights of a shape that are used in turn
_FETCHED = 0.3  # of the L2 cache
_COPIES_TENSORS = (9, 0)  # compute capability of GPUs that copy tensors


def make_ops(device: torch.device, dtype: torch.dtype, tuned: bool) -> FusedOps:
    """Makes fused operations whose products can be tuned, as far as this GPU and dtype admit."""
    if not tuned or dtype not in DTYPES:
        return FusedOps()
    gates: GatedProducts | None = None
    if torch.cuda.get_device_capability(device) >= _COPIES_TENSORS:
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        gates = GatedProducts(num_programs)
    return FusedOps(_make_products(device), gates, FewRowsProducts(count_fetched_bytes(device)))


def count_fetched_bytes(device: torch.device) -> int:
    """Counts the bytes of weights that a kernel may have in the L2 cache before it begins."""
    return int(_FETCHED * torch.cuda.get_device_properties(device).L2_cache_size)


def _make_products(device: torch.device) -> TunedProducts | None:
    """Returns None where there is no cuBLASLt."""
    try:
        return TunedProducts(CublasLt(device))
    except (OSError, AttributeError) as error:
        logger.warning("tuning.products: cuBLASLt cannot be used here (%s); torch chooses algorithms", error)
        return None


class ProductTuning:
    """Tunes the products of one process. `cache` has what an earlier start chose."""

    def __init__(self, ops: FusedOps, cache: TuningCache) -> None:
        self.ops = ops
        self._cache = cache

    @torch.inference_mode()
    def tune(self, decoder: Decoder, limits: RankLimits, max_graph_rows: int, show: Callable[[int, int], None]) -> None:
        """Tunes for steps of up to the limits, and for each of the graphs' sizes. show: (shapes done, all)."""
        graphs = list_graph_sizes(min(max_graph_rows, limits.max_seqs)) if max_graph_rows else []
        products, gates, few_rows = self._find_products(decoder), self._find_gates(decoder), self._find_uses(decoder)
        total = len(products) + len(gates) + len(few_rows)
        for done, (weights, adds, of_samples) in enumerate(products):
            show(done, total)
            sizes = list_product_sizes(graphs, limits.max_seqs if of_samples else limits.max_tokens)
            algorithms = self._choose_algorithms(weights[:_MOST_WEIGHTS], adds, sizes)
            algorithms.use(settle(algorithms, self._cache))
        for done, (weights, activation) in enumerate(gates, len(products)):
            show(done, total)
            tiles = self._choose_tiles(weights[:_MOST_WEIGHTS], activation, list_gated_sizes(limits.max_tokens))
            if tiles.is_open:
                tiles.use(settle(tiles, self._cache))
            assert self.ops.gates is not None
            ranges = ", ".join(f"{first} to {last}" for first, last in self.ops.gates.ranges())
            logger.info("gated products: in one kernel for %s rows", ranges or "no")
        for done, (weights, finish, normed, of_samples) in enumerate(few_rows, len(products) + len(gates)):
            show(done, total)
            sizes = list_few_rows_sizes(limits.max_seqs if of_samples else limits.max_tokens)
            choice = self._choose_few_rows(weights[:_MOST_WEIGHTS], finish, normed, sizes)
            choice.use(settle(choice, self._cache))
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def tune_layers(self, decoder: Decoder, sizes: Sequence[int]) -> None:
        """Tunes layers for steps of exactly so many tokens; nothing is found in the cache or kept."""
        for weights, adds, of_samples in self._find_products(decoder):
            if not of_samples:
                algorithms = self._choose_algorithms(weights, adds, sizes)
                algorithms.use(algorithms.measure())
        for weights, activation in self._find_gates(decoder):
            tiles = self._choose_tiles(weights, activation, sizes)
            if tiles.is_open:
                tiles.use(tiles.measure())

    def _choose_algorithms(self, weights: Sequence[Tensor], adds: bool, sizes: Sequence[int]) -> AlgorithmChoice:
        assert self.ops.products is not None
        return AlgorithmChoice(self.ops.products, weights, adds, sizes)

    def _choose_tiles(self, weights: Sequence[Tensor], activation: str, sizes: Sequence[int]) -> GatedTileChoice:
        gates, products = self.ops.gates, self.ops.products
        assert gates is not None
        library = None if products is None else products.library.version
        separately = partial(_compute_separately, self.ops, activation)
        return GatedTileChoice(gates, weights, activation, sizes, separately, library)

    def _choose_few_rows(
        self, weights: Sequence[Tensor], finish: str, normed: bool, sizes: Sequence[int]
    ) -> FewRowsChoice:
        few_rows, products = self.ops.few_rows, self.ops.products
        assert few_rows is not None
        library = None if products is None else products.library.version
        norm = (weights[0].new_ones(weights[0].shape[1]), 1e-5) if normed else None
        usual = partial(compute_usually, FusedOps(products, self.ops.gates), finish, norm)
        return FewRowsChoice(few_rows, weights, finish, sizes, usual, library, norm)

    def _find_products(self, decoder: Decoder) -> list[tuple[list[Tensor], bool, bool]]:
        """Finds weights of one shape and use: whether the product is added, and whether only sampled rows use it."""
        if self.ops.products is None:
            return []
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
        return [(weights, adds, of_samples) for (_, adds, of_samples), weights in found.items()]

    def _find_gates(self, decoder: Decoder) -> list[tuple[list[Tensor], str]]:
        """Finds weights of one shape whose product is gated, and their activation."""
        if self.ops.gates is None:
            return []
        found: dict[tuple[tuple[int, ...], str], list[Tensor]] = {}
        for module in decoder.modules():
            if isinstance(module, MLP) and module.gate_up.bias is None:
                weight = module.gate_up.weight
                found.setdefault((tuple(weight.shape), module.activation), []).append(weight)
        return [(weights, activation) for (_, activation), weights in found.items()]

    def _find_uses(self, decoder: Decoder) -> list[tuple[list[Tensor], str, bool, bool]]:
        """Finds weights of one shape and use: the finish, whether a norm can be part, whether only sampled rows use it.

        Products that are added to the residual leave nothing to add before the next norm.
        """
        if self.ops.few_rows is None:
            return []
        found: dict[tuple[tuple[int, ...], str, bool, bool], list[Tensor]] = {}
        modules = list(decoder.modules())
        activations = {module.gate_up: module.activation for module in modules if isinstance(module, MLP)}
        adds = all(module.adds for module in modules if isinstance(module, RowLinear))
        for module in modules:
            if isinstance(module, ColumnLinear):
                use = activations.get(module, STORE), adds and module.weight.dtype in NORMED_DTYPES, False
            elif isinstance(module, RowLinear):
                use = ADD if module.adds else STORE, False, False
            elif isinstance(module, VocabularyMatrix) and module is decoder.head:
                use = STORE, False, True
            else:
                continue
            found.setdefault((tuple(module.weight.shape), *use), []).append(module.weight)
        return [(weights, *use[1:]) for use, weights in found.items()]


def _compute_separately(ops: FusedOps, activation: str, x: Tensor, weight: Tensor) -> Tensor:
    return ops.gate(ops.linear(x, weight), activation)


def compute_usually(ops: FusedOps, finish: str, norm: Norm | None, x: Tensor, weight: Tensor, output: Tensor) -> None:
    """Computes a product of few rows without our kernel for it. output: what is added to, if any."""
    if finish == ADD:
        ops.add_linear(output, x, weight, None)
    elif finish == STORE:
        ops.linear(x, weight, None, norm)
    else:
        ops.gated_linear(x, weight, None, finish, norm)
