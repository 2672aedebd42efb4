"""A Gated DeltaNet layer (arXiv:2412.06464) as data: in place of keys and values it keeps a state for each sequence.

Knows no torch and no files.
"""

from __future__ import annotations

import msgspec

from toka_async.checkpoint.matrix_spec import MatrixSpec, PackedUnits, Units

STATE_BYTES = 4  # of a number of a state: it is a sum over all tokens


class DeltaNetSpec(msgspec.Struct, frozen=True, tag="delta_net", kw_only=True):
    """Value heads with a state [key_dim, value_dim] each; consecutive ones share a key head.

    width: tokens that the short convolution sees. by_head: the checkpoint has the projections of each key head and its
    value heads together (Qwen3-Next); otherwise in four matrices, with all heads' queries first (Qwen3.5).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    by_head: bool

    @property
    def num_channels(self) -> int:
        """Values of queries, keys and values, which are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def count_state_bytes(self, itemsize: int) -> int:
        """Counts the bytes that a sequence keeps in the layer. itemsize: of a value of the model's dtype."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return state * STATE_BYTES + self.num_channels * (self.width - 1) * itemsize

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
    def channels(self) -> PackedUnits:
        """The convolution's channels: queries, keys and values, each of all heads."""
        values = self.num_value_heads // self.num_key_heads * self.value_dim
        return PackedUnits(self.num_key_heads, (self.key_dim, self.key_dim, values), by_unit=False)

    def list_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, MatrixSpec, MatrixSpec]:
        """Returns what is convolved with the output's gate z, the gates b and a, and the output.

        Gates are few, and a state depends on them for long: they are never quantized.
        """
        hidden, group = Units(hidden_size), self.num_value_heads // self.num_key_heads
        values, heads = Units(self.num_value_heads, self.value_dim), Units(self.num_value_heads)
        if self.by_head:
            sizes = (self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim)
            projected: tuple[Units | PackedUnits, ...] = (PackedUnits(self.num_key_heads, sizes, by_unit=True),)
            gates: tuple[Units | PackedUnits, ...] = (PackedUnits(self.num_key_heads, (group, group), by_unit=True),)
            names: tuple[tuple[str, ...], ...] = (("in_proj_qkvz",), ("in_proj_ba",))
        else:
            projected, gates = (self.channels, values), (heads, heads)
            names = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
        first, second = (tuple(f"linear_attn.{name}" for name in each) for each in names)
        return (
            MatrixSpec(names=first, outputs=projected, inputs=hidden, split="outputs", format=format),
            MatrixSpec(names=second, outputs=gates, inputs=hidden, split="outputs"),
            MatrixSpec(
                names=("linear_attn.out_proj",), outputs=(hidden,), inputs=values, split="inputs", format=format
            ),
        )

    def count_values(self) -> int:
        """Counts a token's values that are alive at once, beside the layer's input: projections, before and after."""
        projected = self.num_channels + self.num_value_heads * (self.value_dim + 2)
        return projected + self.num_channels + self.num_value_heads * (self.key_dim + 3 * self.value_dim)

    def count_weights(self) -> int:
        """Counts the parameters beside the matrices."""
        return self.num_channels * self.width + 4 * self.num_value_heads + self.value_dim
