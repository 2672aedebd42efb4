"""A layer's attention as data: all that it has of its own, so that layers may differ.

Knows no torch and no files.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.checkpoint.rope_spec import RopeSpec


class HeadNormSpec(msgspec.Struct, frozen=True):
    """RMSNorm of queries and keys before their rotation: of each head, or of a projection's heads as one vector.

    A checkpoint has its weights as `q_norm` and `k_norm`. adds_one: these are what the factors have above 1.
    """

    over: Literal["head", "projection"] = "head"
    adds_one: bool = False


class AttentionSpec(msgspec.Struct, frozen=True, tag="attention", kw_only=True):
    """Grouped-query attention (arXiv:2305.13245) over a layer's own keys and values.

    window: how many positions a token sees, itself included; 0: all before it. rope: None: positions do not count.
    scale: of scores; None: head_dim ** -0.5. soft_cap: c of c * tanh(score / c); 0: none. sinks: each head has a score
    of nothing in its softmax; of all layers or none. gated: outputs are multiplied with the sigmoid of a gate of the
    query's projection. bias: query, key and value projections have one. output_bias: the output projection has one.
    fused: the name of the one tensor that checkpoints have for queries, keys and values; empty: each has its own.
    values_are_keys: values are what the key projection makes, before keys are normed and turned. value_norm: RMSNorm of
    value heads, without weights. reads_back: the layer has no keys and values, and reads those of the layer so many
    layers before it; 0: it has its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    window: int = 0
    scale: float | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    gated: bool = False
    bias: bool = False
    output_bias: bool = False
    head_norm: HeadNormSpec | None = None
    fused: str = ""
    values_are_keys: bool = False
    value_norm: bool = False
    reads_back: int = 0

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def kind(self) -> AttentionSpec:
        """Returns what layers have in common that share a cache and a backend."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=None,
            window=self.window,
            scale=self.scale,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            head_norm=self.head_norm,
        )

    @property
    def cached_values(self) -> int:
        """How many numbers a token leaves in the KV cache."""
        return 2 * self.num_kv_heads * self.head_dim

    def can_divide(self, tp: int) -> bool:
        """Tells whether `tp` divides query heads, and KV heads can be divided or copied."""
        return self.num_heads % tp == 0 and (self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0)

    def divide(self, tp: int) -> AttentionSpec:
        """Returns what one of `tp` ranks computes."""
        return msgspec.structs.replace(
            self, num_heads=self.num_heads // tp, num_kv_heads=max(1, self.num_kv_heads // tp)
        )

    def describe(self) -> str:
        """Names what tensor ranks divide."""
        return f"{self.num_heads} heads, {self.num_kv_heads} KV heads"

    def list_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, ...]:
        """Returns query, key and value as one, or the query alone where keys are another layer's, and the output."""
        order = () if self.rope is None else self.rope.order_head(self.head_dim)
        queries, keys = (Units(count, self.head_dim, order) for count in (self.num_heads, self.num_kv_heads))
        values, hidden = Units(self.num_kv_heads, self.head_dim), Units(hidden_size)
        if self.gated:  # a head's query and then its gate; on a rank all gates come first, so that other heads touch
            dim = self.head_dim
            queries = Units(self.num_heads, 2 * dim, kinds=((dim, dim), (0, dim)))
        names: tuple[str, ...] = ("self_attn.q_proj",)
        outputs: tuple[Units, ...] = (queries,)
        if not self.reads_back:
            value_name = "self_attn.k_proj" if self.values_are_keys else "self_attn.v_proj"
            names, outputs = (*names, "self_attn.k_proj", value_name), (*outputs, keys, values)
        if self.fused:
            names = (self.fused,) * len(names)
        return (
            MatrixSpec(
                names=names,
                outputs=outputs,
                inputs=hidden,
                split="outputs",
                bias=self.bias,
                format=format,
                fused=bool(self.fused),
            ),
            MatrixSpec(
                names=("self_attn.o_proj",),
                outputs=(hidden,),
                inputs=Units(self.num_heads, self.head_dim),
                split="inputs",
                bias=self.output_bias,
                format=format,
            ),
        )

    def count_values(self) -> int:
        """Counts a token's values that are alive at once, beside the layer's input: projections, before and after."""
        return 2 * (self.num_heads * (1 + self.gated) + 2 * self.num_kv_heads) * self.head_dim

    def count_weights(self) -> int:
        """Counts the parameters beside the matrices."""
        heads = self.num_heads + (not self.reads_back) * self.num_kv_heads
        norm = (self.head_norm is not None) * heads * self.head_dim
        return norm + self.sinks * self.num_heads
