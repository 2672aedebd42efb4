"""Tunes a GPU's products with the model's matrices for steps' numbers of rows.

A weight format says what there is to choose: an entry in `CHOICES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from toka_async.bar import Show
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.quantization import FORMATS
from toka_async.kernels.cublaslt import CublasLt
from toka_async.kernels.experts.mixture import ExpertKernels
from toka_async.kernels.few_rows import FewRowsProducts
from toka_async.kernels.fp8.ops import ScaledKernels
from toka_async.kernels.fp8.products import ScaledProducts
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts
from toka_async.kernels.matmul import TunedProducts
from toka_async.model.decoder import RankModel
from toka_async.runner.graphs import DENSE_ROWS, list_graph_sizes
from toka_async.tuning.dense import list_dense_choices
from toka_async.tuning.experts import list_expert_choices
from toka_async.tuning.fp8 import list_fp8_choices
from toka_async.tuning.matrix_group import MatrixGroup, RowCounts, group_matrices
from toka_async.tuning.settle import UsableChoice, settle
from toka_async.tuning.store import TuningCache

logger = logging.getLogger(__name__)

# For weight formats: the choices for a group of matrices, each of which is used before the next one is asked for.
CHOICES: dict[str, Callable[[FusedOps, MatrixGroup, RowCounts], Iterator[UsableChoice[Any]]]] = {
    "dense": list_dense_choices,
    **dict.fromkeys(FORMATS, list_fp8_choices),
}
DTYPES = (torch.bfloat16, torch.float16)
_FETCHED = 0.07  # of the L2 cache: weights that a product of few rows may have there before it begins
_PROGRAMS_PER_SM = 6  # of such a product that run at once, about
_COPIES_TENSORS = (9, 0)  # compute capability of GPUs that copy tensors


def make_ops(device: torch.device, dtype: torch.dtype, tuned: bool) -> FusedOps:
    """Makes fused operations whose products can be tuned, as far as this GPU and dtype admit."""
    if not tuned or dtype not in DTYPES:
        return FusedOps(scaled=ScaledKernels(ScaledProducts()), experts=ExpertKernels())
    gates: GatedProducts | None = None
    if torch.cuda.get_device_capability(device) >= _COPIES_TENSORS:
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        gates = GatedProducts(num_programs)
    products, few_rows = _make_products(device), make_few_rows(device)
    scaled_products = ScaledProducts(None if products is None else products.library)
    return FusedOps(products, gates, few_rows, ScaledKernels(scaled_products, gates, few_rows), ExpertKernels())


def make_few_rows(device: torch.device) -> FewRowsProducts:
    chip = torch.cuda.get_device_properties(device)
    return FewRowsProducts(int(_FETCHED * chip.L2_cache_size), _PROGRAMS_PER_SM * chip.multi_processor_count)


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
    def tune(self, decoder: RankModel, limits: RankLimits, max_graph_rows: int, show: Show) -> None:
        """Tunes for steps of up to the limits, and for each of the graphs' close sizes."""
        graphs = list_graph_sizes(min(max_graph_rows, limits.max_seqs, DENSE_ROWS)) if max_graph_rows else []
        groups = group_matrices(decoder)
        for done, group in enumerate(groups):
            show(done, len(groups), "shapes tuned")
            for choice in self._list_choices(group, RowCounts(_count_most(group, limits), graphs)):
                choice.use(settle(choice, self._cache))
        for plans in list_expert_choices(self.ops.experts, decoder, RowCounts(limits.max_tokens)):
            plans.use(settle(plans, self._cache))
        torch.cuda.empty_cache()

    def list_builds(self, decoder: RankModel, limits: RankLimits) -> list[Callable[[], None]]:
        """Lists functions that each compile a kernel which `tune` runs. They read the weights, whatever these hold."""
        return [
            build
            for group in group_matrices(decoder)
            for choice in self._list_choices(group, RowCounts(_count_most(group, limits)))
            for build in choice.list_builds()
        ]

    @torch.inference_mode()
    def tune_layers(self, decoder: RankModel, sizes: Sequence[int]) -> None:
        """Tunes layers for steps of exactly so many tokens; nothing is found in the cache or kept."""
        for group in group_matrices(decoder):
            if not group.use.of_samples:
                for choice in self._list_choices(group, RowCounts(sizes[-1], exact=sizes)):
                    choice.use(choice.measure())
        for plans in list_expert_choices(self.ops.experts, decoder, RowCounts(sizes[-1], exact=sizes)):
            plans.use(plans.measure())

    def _list_choices(self, group: MatrixGroup, counts: RowCounts) -> Iterator[UsableChoice[Any]]:
        choices = CHOICES.get(group.use.matrix.spec.format)
        return iter(()) if choices is None else choices(self.ops, group, counts)


def _count_most(group: MatrixGroup, limits: RankLimits) -> int:
    return limits.max_seqs if group.use.of_samples else limits.max_tokens
