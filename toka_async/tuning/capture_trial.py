"""Finds out whether a model's code can be captured in a CUDA graph: code that looks at the device's results cannot."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch, QueryKeyNorm
from toka_async.model.decoder import RankModel

logger = logging.getLogger(__name__)
NUM_TOKENS = 2


class QueriesOnly:
    """Stands for attention: each token gets its queries back."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads

    def plan(self, batch: AttentionBatch) -> None:
        """There is nothing to prepare."""

    def attend(
        self,
        layer: int,  # noqa: ARG002
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],  # noqa: ARG002
        norm: QueryKeyNorm | None = None,  # noqa: ARG002
        sinks: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        return heads[:, : self._num_heads].contiguous()


@torch.inference_mode()
def can_be_captured(model: RankModel, num_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Captures a step of a rank's model. num_heads: of the rank. width: of residuals that come in; 0: ids do."""
    attention, positions = QueriesOnly(num_heads), torch.arange(NUM_TOKENS, device=device)
    inputs = torch.zeros(NUM_TOKENS, width, dtype=dtype, device=device) if width else torch.zeros_like(positions)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        model.forward(inputs, positions, attention)  # what is made once is made now
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            model.forward(inputs, positions, attention)
    except RuntimeError as error:
        logger.info("a capture failed: %s", str(error).partition("\n")[0])
        torch.cuda.synchronize(device)
        return False
    return True
