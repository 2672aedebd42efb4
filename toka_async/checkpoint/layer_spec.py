"""A model's layers as data: a mixer of tokens, such as attention, then a feed, of each of which there may be kinds.

Knows no torch and no files.
"""

from __future__ import annotations

import msgspec

from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.delta_net_spec import DeltaNetSpec
from toka_async.checkpoint.experts_spec import ExpertsFeedSpec
from toka_async.checkpoint.foreign_spec import ForeignAttentionSpec, ForeignFeedSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units, join_alike


class DenseFeedSpec(msgspec.Struct, frozen=True, tag="dense"):
    """The gated feed-forward network (arXiv:2002.05202) of `inner` units.

    fused: the name of the one tensor that checkpoints have for gate and up; empty: each has its own.
    """

    inner: int
    activation: str
    bias: bool
    fused: str = ""

    def can_divide(self, tp: int) -> bool:
        return self.inner % tp == 0

    def divide(self, tp: int) -> DenseFeedSpec:
        """Returns what one of `tp` ranks computes."""
        return msgspec.structs.replace(self, inner=self.inner // tp)

    def describe(self) -> str:
        """Names what tensor ranks divide."""
        return f"intermediate_size of {self.inner}"

    def list_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, MatrixSpec]:
        """Returns gate and up as one, and down."""
        hidden, inner = Units(hidden_size), Units(self.inner)
        return (
            MatrixSpec(
                names=(self.fused,) * 2 if self.fused else ("mlp.gate_proj", "mlp.up_proj"),
                outputs=(inner, inner),
                inputs=hidden,
                split="outputs",
                bias=self.bias,
                format=format,
                fused=bool(self.fused),
            ),
            MatrixSpec(
                names=("mlp.down_proj",), outputs=(hidden,), inputs=inner, split="inputs", bias=self.bias, format=format
            ),
        )

    def count_values(self, hidden_size: int) -> int:  # noqa: ARG002
        """Counts a token's values that are alive at once, beside the layer's input: gate, up and their product."""
        return 3 * self.inner


class LayerInputSpec(msgspec.Struct, frozen=True):
    """A vector of `size` numbers of each token that a layer takes in after its feed, as Gemma 4's small models do.

    It is multiplied with a gate that is made of the residual, then projected, normed and added to the residual. Every
    tensor rank has all of the matrices. norm: its name.
    """

    size: int
    activation: str
    norm: str = "post_per_layer_input_norm"

    def list_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, MatrixSpec]:
        """Returns the gate and the projection."""
        names, shapes = ("per_layer_input_gate", "per_layer_projection"), (hidden_size, self.size)
        gate, projection = (
            MatrixSpec(
                names=(name,), outputs=(Units(num_outputs),), inputs=Units(num_inputs), split="outputs", format=format
            )
            for name, num_inputs, num_outputs in zip(names, shapes, shapes[::-1], strict=True)
        )
        return gate, projection


MixerSpec = AttentionSpec | DeltaNetSpec | ForeignAttentionSpec
FeedSpec = DenseFeedSpec | ExpertsFeedSpec | ForeignFeedSpec


class NormSpec(msgspec.Struct, frozen=True):
    """RMSNorm (arXiv:1910.07467). adds_one: the checkpoint's weights are what the factors have above 1."""

    eps: float
    adds_one: bool = False


class NormNames(msgspec.Struct, frozen=True):
    """What a layer's norms are called, and so where it has some: of the inputs of its halves, and of their results.

    An empty name: there is none.
    """

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""
    before_feed: str = "post_attention_layernorm"
    after_feed: str = ""

    @property
    def count(self) -> int:
        return sum(map(bool, (self.before_mixer, self.after_mixer, self.before_feed, self.after_feed)))


class LayerSpec(msgspec.Struct, frozen=True):
    """What one layer need not have in common with the others."""

    mixer: MixerSpec
    feed: FeedSpec
    norms: NormNames = NormNames()
    scalar: str = ""  # the name of a number that all of the layer's result is multiplied with; empty: there is none
    format: str = "dense"  # of its matrices, see `MatrixSpec`
    input: LayerInputSpec | None = None
    exempt: tuple[str, ...] = ()  # names of matrices that are dense in any case

    def list_mixer_matrices(self, hidden_size: int) -> tuple[MatrixSpec, ...]:
        return join_alike(self._choose_formats(*self.mixer.list_matrices(hidden_size, self.format)))

    def list_feed_matrices(self, hidden_size: int) -> tuple[MatrixSpec, ...]:
        return self._choose_formats(*self.feed.list_matrices(hidden_size, self.format))

    def list_input_matrices(self, hidden_size: int) -> tuple[MatrixSpec, ...]:
        return () if self.input is None else self._choose_formats(*self.input.list_matrices(hidden_size, self.format))

    def _choose_formats(self, *matrices: MatrixSpec) -> tuple[MatrixSpec, ...]:
        """Returns the matrices in the formats that they have in this layer."""
        return tuple(
            msgspec.structs.replace(matrix, format="dense") if set(matrix.names) <= set(self.exempt) else matrix
            for matrix in matrices
        )
