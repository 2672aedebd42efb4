"""A Gated DeltaNet layer (arXiv:2412.06464) as data: in place of keys and values it keeps a state for each sequence.

Knows no torch and no files.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import msgspec

from toka_async.checkpoint.matrix_spec import MatrixSpec, Units

StateDtype = Literal["float32", "bfloat16", "float16"]
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class DeltaNetSpec(msgspec.Struct, frozen=True, tag="delta_net", kw_only=True):
    """Value heads with a state [key_dim, value_dim] each; consecutive ones share a key head.

    width: tokens that the short convolution sees. by_head: the checkpoint has the projections of each key head and its
    value heads together (Qwen3-Next); otherwise in four matrices, with all heads' queries first (Qwen3.5). Either way a
    rank's rows are those of all queries, keys, values, then z, b and a. state_dtype: in which states are stored; they
    are computed in float32.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    by_head: bool
    state_dtype: StateDtype = "float32"

    @property
    def num_channels(self) -> int:
        """Values of queries, keys and values, which are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def count_state_bytes(self, itemsize: int) -> int:
        """Counts the bytes that a sequence keeps in the layer. itemsize: of a value of the model's dtype."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return state * STATE_BYTES[self.state_dtype] + self.num_channels * (self.width - 1) * itemsize

    def count_flops(self) -> int:
        """Counts the operations of a token with the states: what its key finds, what it adds, what its query reads."""
        return 6 * self.num_value_heads * self.key_dim * self.value_dim

    def can_divide(self, tp: int) -> bool:
        """Tells whether `tp` divides the key heads, with their value heads."""
        return self.num_key_heads % tp == 0

    def divide(self, tp: int) -> DeltaNetSpec:
        """Returns what one of `tp` ranks computes."""
        return msgspec.structs.replace(
            self, num_key_heads=self.num_key_heads // tp, num_value_heads=self.num_value_heads // tp
        )

    def describe(self) -> str:
        """Names what tensor ranks divide."""
        return f"{self.num_key_heads} key heads of recurrent layers"

    @property
    def channels(self) -> tuple[Units, Units, Units]:
        """The convolution's channels: queries, keys and values, each of all heads."""
        keys = Units(self.num_key_heads, self.key_dim)
        return keys, keys, Units(self.num_value_heads, self.value_dim)

    def list_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, ...]:
        """Returns what is convolved with the output's gate z, the gates b and a, and the output.

        Gates are few, and a state depends on them for long: they are never quantized.
        """
        hidden, values, heads = Units(hidden_size), self.channels[-1], Units(self.num_value_heads)
        names: tuple[str, ...] = ("linear_attn.in_proj_qkv",) * 3 + ("linear_attn.in_proj_z",)
        outputs: tuple[Units, ...] = (*self.channels, values)
        gate_names: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
        gates: tuple[Units, ...] = (heads, heads)
        if self.by_head:
            group = self.num_value_heads // self.num_key_heads
            names, gate_names = ("linear_attn.in_proj_qkvz",), ("linear_attn.in_proj_ba",)
            outputs = (self._pack(self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim),)
            gates = (self._pack(group, group),)
        return (
            MatrixSpec(names=names, outputs=outputs, inputs=hidden, split="outputs", format=format, fused=True),
            MatrixSpec(names=gate_names, outputs=gates, inputs=hidden, split="outputs"),
            MatrixSpec(
                names=("linear_attn.out_proj",), outputs=(hidden,), inputs=values, split="inputs", format=format
            ),
        )

    def _pack(self, *sizes: int) -> Units:
        """Returns the rows of a matrix that has several kinds of each key head together."""
        starts = accumulate(sizes, initial=0)
        return Units(self.num_key_heads, sum(sizes), kinds=tuple(zip(starts, sizes, strict=False)))

    def count_values(self) -> int:
        """Counts a token's values that are alive at once, beside the layer's input: projections, before and after."""
        projected = self.num_channels + self.num_value_heads * (self.value_dim + 2)
        return projected + self.num_channels + self.num_value_heads * (self.key_dim + 3 * self.value_dim)

    def count_weights(self) -> int:
        """Counts the parameters beside the matrices."""
        return self.num_channels * self.width + 4 * self.num_value_heads + self.value_dim
