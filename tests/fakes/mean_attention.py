"""A decoder's logits over a stand-in for attention, which needs no cache: what splitting a decoder must not change."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch, QueryKeyNorm
from toka_async.attention.rope import rotate
from toka_async.checkpoint.division import group_experts
from toka_async.checkpoint.spec import read_spec
from toka_async.model.activation_layout import LayoutPolicy, Replicated, SequenceSharded
from toka_async.model.comm import Comm
from toka_async.model.decoder import Decoder
from toka_async.model.weights import build_decoder, load_weights

TOKENS = 7


class MeanAttention:
    """A head's output is its values and query, times its sink, shifted by a token."""

    def __init__(self, num_kv_heads: int) -> None:
        self.num_kv_heads = num_kv_heads
        self.kept: dict[int, Tensor] = {}  # what layers that have no keys read

    def plan(self, batch: AttentionBatch) -> None:
        raise AssertionError(f"the model does not plan {batch}")

    def attend(
        self,
        layer: int,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],
        norm: QueryKeyNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if norm is not None and len(norm.weight) == heads.shape[1]:  # queries alone
            query = rotate(heads * norm.weight + norm.eps, rotation)
            return query.roll(1, 0) + self.kept[layer].repeat_interleave(heads.shape[1] // self.num_kv_heads, dim=1)
        num_queries = heads.shape[1] - 2 * self.num_kv_heads
        query_key, value = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        if norm is not None:
            query_key = query_key * norm.weight + norm.eps
        query, key = torch.split(rotate(query_key, rotation), [num_queries, self.num_kv_heads], dim=1)
        repeat = num_queries // self.num_kv_heads
        if sinks is not None:
            query = query * sinks[:, None]
        self.kept[layer] = key * value + layer
        return query.roll(1, 0) + self.kept[layer].repeat_interleave(repeat, dim=1)


def load(folder: Path, comm: Comm, layouts: LayoutPolicy | None = None, ep: int = 1) -> Decoder:
    """The rank's part of a checkpoint, in float64. ep: groups of ranks that divide experts."""
    spec = group_experts(read_spec(folder), ep)
    decoder = build_decoder(spec, torch.float64, torch.device("cpu"), comm, layouts=layouts)
    load_weights(decoder, folder)
    return decoder


@torch.inference_mode()
def run(decoder: Decoder, num_kv_heads: int = 1, num_tokens: int = TOKENS, wanted: Tensor | None = None) -> Tensor:
    """Logits of the tokens."""
    ids, positions = torch.arange(num_tokens) * 43 % 261, torch.arange(num_tokens) + 3
    return decoder.logits(decoder(ids, positions, MeanAttention(num_kv_heads), wanted))


def in_shards(comm: Comm, min_tokens: int = 1) -> LayoutPolicy:
    """Steps of `min_tokens` tokens and more are in shards."""
    return LayoutPolicy(Replicated(comm), SequenceSharded(comm), min_tokens)
