"""The decoder of all families: token ids and positions in, hidden states and logits out.

Shapes: t tokens of all rows of a step, one after the other. Which tokens see which is the attention backend's
business. Knows no rows, no pages, no checkpoint; families differ only by their `ModelSpec`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toka_async.attention.base import AttentionBackend
from toka_async.model.comm import Comm, share_of
from toka_async.model.layers import ACTIVATIONS, ColumnLinear, HeadNorm, RMSNorm, RowLinear, unset
from toka_async.model.rope import Rope, rotate
from toka_async.model.spec import ModelSpec

Rotation = tuple[Tensor, Tensor]


class Decoder(nn.Module):
    """A decoder-only transformer. Its parameters are unset: see `toka_async.model.weights`."""

    def __init__(self, spec: ModelSpec, comm: Comm) -> None:
        super().__init__()
        self.embedding = unset(spec.vocab_size, spec.hidden_size)
        self.rope = Rope(spec.rope, spec.head_dim)
        self.layers = nn.ModuleList(Layer(spec, index, comm) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.head = self.embedding if spec.tie_embeddings else unset(spec.vocab_size, spec.hidden_size)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """token_ids, positions: int64 [t]. Returns the normalised hidden states [t, hidden]."""
        hidden = F.embedding(token_ids, self.embedding)  # [t, hidden]
        rotation = self.rope(positions, hidden.dtype)  # cos, sin: [t, 1, dim]
        for layer in self.layers:
            hidden = layer(hidden, rotation, attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[s, hidden] to [s, vocab], in the activations' dtype."""
        return F.linear(hidden, self.head)


class Layer(nn.Module):
    """Attention and a gated MLP, each with a norm before and a residual around."""

    def __init__(self, spec: ModelSpec, index: int, comm: Comm) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec, index, comm)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = MLP(spec, comm)

    def forward(self, hidden: Tensor, rotation: Rotation, backend: AttentionBackend) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, backend)
        after: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return after


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions."""

    def __init__(self, spec: ModelSpec, index: int, comm: Comm) -> None:
        super().__init__()
        self.index = index
        self.dim = spec.head_dim
        self.num_heads = share_of(spec.num_heads, comm).size
        self.num_kv_heads = share_of(spec.num_kv_heads, comm).size
        wide, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = ColumnLinear(spec.hidden_size, (wide, narrow, narrow), spec.attention_bias, comm)
        self.head_norm = HeadNorm(self.num_heads, self.num_kv_heads, self.dim, spec.norm_eps) if spec.qk_norm else None
        self.output = RowLinear(wide, spec.hidden_size, spec.output_bias, comm)

    def forward(self, hidden: Tensor, rotation: Rotation, backend: AttentionBackend) -> Tensor:
        heads = self.qkv(hidden).view(len(hidden), -1, self.dim)  # [t, heads + 2 kv_heads, dim]
        query_key, value = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.head_norm is not None:
            query_key = self.head_norm(query_key)
        query, key = torch.split(rotate(query_key, rotation), [self.num_heads, self.num_kv_heads], dim=1)
        mixed = backend.attend(self.index, query, key, value)  # [t, heads, dim]
        output: Tensor = self.output(mixed.flatten(1))
        return output


class MLP(nn.Module):
    """The gated feed-forward network (arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec, comm: Comm) -> None:
        super().__init__()
        inner = spec.intermediate_size
        self.activation = ACTIVATIONS[spec.activation]
        self.gate_up = ColumnLinear(spec.hidden_size, (inner, inner), spec.mlp_bias, comm)
        self.down = RowLinear(inner, spec.hidden_size, spec.mlp_bias, comm)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)  # [t, inner] each
        output: Tensor = self.down(self.activation(gate) * up)
        return output
