"""Has a GPU's products with the model's matrices tuned, for the numbers of rows that steps have.

Knows which matrices a decoder has; how algorithms are found and chosen is in `kernels.matmul`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from toka_async.kernels.cublaslt import CublasLt
from toka_async.kernels.matmul import TunedProducts, event_clock, tuned_sizes
from toka_async.model.decoder import Decoder
from toka_async.model.layers import ColumnLinear, RowLinear, Vocabulary
from toka_async.runner.graphs import graph_sizes
from toka_async.runner.limits import Limits

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
_MOST_WEIGHTS = 8  # of a shape that are used in turn


def make_products(device: torch.device) -> TunedProducts | None:
    """None where there is no cuBLASLt."""
    try:
        return TunedProducts(CublasLt(device), event_clock)
    except (OSError, AttributeError) as error:
        logger.warning("compile.tune: cuBLASLt cannot be used here (%s); torch chooses algorithms", error)
        return None


@torch.inference_mode()
def tune_products(
    decoder: Decoder,
    products: TunedProducts,
    limits: Limits,
    max_graph_seqs: int,
    show: Callable[[int, int], None],
) -> None:
    """Tune for steps of up to the limits; graphs' numbers of rows each for itself. show: (shapes done, all)."""
    matrices = _matrices(decoder)
    graphs = graph_sizes(min(max_graph_seqs, limits.max_seqs)) if max_graph_seqs else []
    for done, ((_, adds, most_seqs), weights) in enumerate(matrices.items()):
        show(done, len(matrices))
        most = limits.max_seqs if most_seqs else limits.max_tokens
        products.tune(weights[:_MOST_WEIGHTS], adds, tuned_sizes(graphs, most))
    torch.cuda.empty_cache()


def _matrices(decoder: Decoder) -> dict[tuple[tuple[int, ...], bool, bool], list[Tensor]]:
    """Matrices by their shape, whether products with them are added, and whether sampled rows alone go through them."""
    found: dict[tuple[tuple[int, ...], bool, bool], list[Tensor]] = {}
    for module in decoder.modules():
        if isinstance(module, ColumnLinear) and module.bias is None:
            key = tuple(module.weight.shape), False, False
        elif isinstance(module, RowLinear) and module.bias is None:
            key = tuple(module.weight.shape), module.adds, False
        elif isinstance(module, Vocabulary) and module is decoder.head:
            key = tuple(module.weight.shape), False, True
        else:
            continue
        found.setdefault(key, []).append(module.weight)
    return found
