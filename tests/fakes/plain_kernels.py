"""`SamplingKernels` in plain torch on a CPU, for tests of what is around them: reads and writes the same table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from toka_async.model.logprobs import distribution
from toka_async.model.rng import draw_uniforms
from toka_async.model.sampling import PARAMS, Flag, Params, clean, sample

if TYPE_CHECKING:  # needs Triton
    from toka_async.kernels.sampling import RowTable

_NAMES = ("temperature", "top_p", "min_p", "repetition", "top_k", "flags")


class PlainKernels:
    """Knows of a row what its slot's line of the table says, and nothing else."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        assert device.type == "cpu"
        self.vocab_size = vocab_size
        self.max_rows = max_rows

    def draw(self, logits: Tensor, slots: Tensor, contexts: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """See `SamplingKernels.draw`."""
        num_rows = len(slots)
        assert num_rows <= self.max_rows
        assert logits.shape == (num_rows, self.vocab_size)
        assert contexts.dtype == torch.int32
        params = np.zeros(num_rows, dtype=PARAMS)
        for name in _NAMES:
            params[name] = getattr(table, name)[slots].numpy()
        logits = clean(logits.clone())
        penalises = torch.from_numpy((params["flags"] & Flag.REPETITION) != 0)
        penalised = torch.where(penalises[:, None] & self.seen(table)[slots], _penalised(logits, params), logits)
        numbers = (contexts - table.num_prompt[slots]).long().numpy()
        token_ids = sample(penalised, params, draw_uniforms(table.seeds[slots].numpy(), numbers))
        for slot, token in zip(slots[penalises].tolist(), token_ids[penalises].tolist(), strict=True):
            table.seen[slot, token // 32] |= torch.tensor(1 << token % 32).to(torch.int32)
        asks = torch.from_numpy((params["flags"] & Flag.LOGPROBS) != 0)
        logprobs = distribution(logits).gather(1, token_ids[:, None])[:, 0]
        return token_ids, torch.where(asks, logprobs, 0.0)

    def seen(self, table: RowTable) -> Tensor:
        """The bits of the table: bool [slots, vocab]."""
        bits = np.unpackbits(table.seen.numpy().view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self.vocab_size].astype(np.bool_))


def _penalised(logits: Tensor, params: Params) -> Tensor:
    penalty = torch.from_numpy(params["repetition"].copy())[:, None]
    return torch.where(logits > 0, logits / penalty, logits * penalty)
