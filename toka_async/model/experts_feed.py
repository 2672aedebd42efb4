"""A mixture of experts as a `Feed` (arXiv:2401.04088): a router chooses the networks that a token passes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from toka_async.checkpoint.experts_spec import ExpertMatrixSpec, ExpertNames, ExpertsFeedSpec
from toka_async.checkpoint.layer_spec import LayerSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.checkpoint.quantization import BLOCK, FORMATS
from toka_async.kernels.experts.weights import ExpertOfAll, ExpertWeights
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.layers import InputNorm
from toka_async.model.matrices.build import build_matrix
from toka_async.model.matrices.fp8 import list_scaled_parts
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.scaling import FP8
from toka_async.model.matrices.share import Share, share_of, whole_of


@dataclass(slots=True, frozen=True)
class _Member:
    """A rank among those of a group, or a group among all."""

    rank: int
    size: int


class ExpertMatrix(nn.Module):
    """A matrix [held, n, k] of each of the rank's experts; several of a checkpoint with one input are one."""

    def __init__(
        self, spec: ExpertMatrixSpec, held: Share, outputs: Share, inputs: Share, names: Sequence[str]
    ) -> None:
        """held: the rank's experts. outputs: of each of several matrices. names: the last parts of the checkpoint's."""
        super().__init__()
        self.held = held
        self.outputs = outputs
        self.inputs = inputs
        self.names = names
        assert spec.format == "dense" or spec.format in FORMATS, f"experts have no weights of the format {spec.format}"
        self.quantization = FORMATS.get(spec.format)
        self.num_matrices = len(spec.outputs)
        self.dtype = torch.get_default_dtype()
        n, k = self.num_matrices * outputs.size, inputs.size
        # Of ranks that divide the inputs, the first adds the bias.
        self.bias = make_unset(0 if inputs.start else held.size, n) if spec.bias else None
        self.weight = make_unset(held.size, n, k)
        self.scales: nn.Parameter | None = None
        if self.quantization is not None:
            blocks = (n // BLOCK, k // BLOCK) if self.quantization.scaling == "block" else (n,)
            self.weight = nn.Parameter(torch.empty(held.size, n, k, dtype=FP8), requires_grad=False)
            self.scales = nn.Parameter(torch.zeros(held.size, *blocks, dtype=torch.float32), requires_grad=False)

    @property
    def own_bias(self) -> Tensor | None:
        """[held, n]; None: there is none, or another rank adds it."""
        return self.bias if self.bias is not None and len(self.bias) else None

    def parts(self, names: ExpertNames) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors of all experts; those of other ranks have no values here."""
        if names.gate_up:
            yield from self._list_stacked(names.name_matrix(0, self.names[0]))
            return
        assert self.bias is None, "no family has biases of its own for each expert"
        for number in range(self.held.total):
            for index, name in enumerate(self.names):
                yield from self._list_parts(number - self.held.start, index, names.name_matrix(number, name))

    def _list_parts(self, place: int, index: int, name: str) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors of a matrix of the expert at a place, which may be another rank's."""
        is_held = 0 <= place < self.held.size
        share = self.outputs if is_held else Share(self.outputs.total, 0, 0)
        weight = self.weight.data.chunk(self.num_matrices, dim=1)[index]
        values = weight[place] if is_held else weight[:0, 0]
        if self.quantization is None or self.scales is None:
            yield f"{name}.weight", WeightPart(values, (share, self.inputs))
            return
        scales = self.scales.data.chunk(self.num_matrices, dim=1)[index]
        scales = scales[..., None] if scales.ndim == 2 else scales
        scales = scales[place] if is_held else scales[:0, 0]
        yield from list_scaled_parts(self.quantization, name, values, scales, self.dtype, share, self.inputs)

    def _list_stacked(self, name: str) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensor of all experts' matrices [experts, inputs, outputs], and that of their biases."""
        parts = [
            [part for _, part in self._list_parts(place, index, "")]
            for place in range(self.held.size)
            for index in range(self.num_matrices)
        ]
        assert all(len(part) == 1 for part in parts), "a checkpoint has no scales for stacked experts"
        outputs = self.outputs.times(self.num_matrices)
        shares, kept = (self.held, parts[0][0].shares[1], outputs), (self.held, self.inputs, outputs)

        def store(values: Tensor) -> None:
            for number, (part,) in enumerate(parts):
                place, index = divmod(number, self.num_matrices)
                part.write(values[place].to(part.target.device)[:, index :: self.num_matrices].T)

        def restore() -> Tensor:
            whole = self.weight.new_empty(self.weight.shape, dtype=self.dtype).transpose(1, 2)
            for number, (part,) in enumerate(parts):
                place, index = divmod(number, self.num_matrices)
                whole[place, :, index :: self.num_matrices] = (part.restore() if part.restore else part.target).T
            return whole

        yield name, WeightPart(self.weight.data, shares, store=store, restore=restore, kept=kept)
        if self.bias is not None:
            yield f"{name}_bias", self._make_bias_part(self.bias.data, outputs)

    def _make_bias_part(self, bias: Tensor, outputs: Share) -> WeightPart:
        def store(values: Tensor) -> None:
            bias.copy_(torch.cat([values[:, index :: self.num_matrices] for index in range(self.num_matrices)], 1))

        def restore() -> Tensor:
            return torch.stack(bias.chunk(self.num_matrices, dim=1), 2).flatten(1)

        held = self.held if len(bias) else Share(self.held.total, 0, 0)
        return WeightPart(bias, (held, outputs), store=store, restore=restore)


class ExpertsFeed(nn.Module):
    """Ranks route all tokens alike. Each computes what its experts, or its units of them, make of them.

    Groups of tensor ranks divide the experts, the ranks of a group their units; the sum over all ranks is that of a
    dense feed.
    """

    def __init__(self, layer: LayerSpec, hidden_size: int, comm: Comm, ops: Ops, adds: bool = True) -> None:
        super().__init__()
        feed = layer.feed
        assert isinstance(feed, ExpertsFeedSpec)
        self.spec = feed
        self.ops = ops
        self.is_alone = comm.size == 1
        self.adds = adds and self.is_alone
        router, gate_up, down, *of_shared = layer.list_feed_matrices(hidden_size)
        assert isinstance(gate_up, ExpertMatrixSpec)
        assert isinstance(down, ExpertMatrixSpec)
        self.router = build_matrix(router, LocalComm(), ops)
        group, rank = divmod(comm.rank, comm.size // feed.num_groups)
        held = share_of(feed.num_experts, _Member(group, feed.num_groups))
        inner = share_of(feed.inner, _Member(rank, comm.size // feed.num_groups))
        names, hidden = feed.names, whole_of(hidden_size)
        self.first = held.start
        self.gate_up = ExpertMatrix(gate_up, held, inner, hidden, names.list_gate_up())
        self.down = ExpertMatrix(down, held, hidden, inner, (names.down,))
        self.shared = SharedExpert(of_shared, feed.activation, comm, ops) if of_shared else None
        self.dtype = torch.get_default_dtype()
        self.loads = nn.Buffer(torch.zeros(feed.num_experts, dtype=torch.int64))  # tokens that chose each expert
        self.counted: Tensor | None = None  # see `ExpertWeights`

    def forward(
        self, hidden: Tensor | None, residual: Tensor, norm: InputNorm, layout: ActivationLayout
    ) -> tuple[Tensor | None, Tensor]:
        normed, residual = norm(hidden, residual)
        x = layout.gather(normed)
        logits = self.router.product(self.router.take(x))
        of_all = None if self.shared is None else self.shared.pass_through(x)
        mixed = self.ops.mix_experts(x, logits, self.weights, residual if self.adds else None, of_all)
        return (None, mixed) if self.adds else (layout.reduce(mixed), residual)

    @property
    def weights(self) -> ExpertWeights:
        spec = self.spec
        return ExpertWeights(
            gate_up=self.gate_up.weight,
            down=self.down.weight,
            first=self.first,
            top_k=spec.top_k,
            renormalizes=spec.renormalizes,
            activation=spec.activation,
            loads=self.loads,
            counted=self.counted,
            gate_up_scales=self.gate_up.scales,
            down_scales=self.down.scales,
            gate_up_bias=self.gate_up.own_bias,
            down_bias=self.down.own_bias,
        )

    def uses(self, normed: torch.dtype | None) -> Iterator[MatrixUse]:  # noqa: ARG002
        """Yields the router of a rank alone: several must round alike, but each chooses its own fastest product."""
        if self.is_alone:
            yield MatrixUse(self.router)
        if self.shared is not None:
            yield from self.shared.uses()

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.router.parts()
        yield from self.gate_up.parts(self.spec.names)
        yield from self.down.parts(self.spec.names)
        if self.shared is not None:
            yield from self.shared.parts()


class SharedExpert(nn.Module):
    """A gated network that all tokens pass through, of which each tensor rank has a part; a gate says its share.

    Unlike its two other matrices, the gate is whole on each rank, and never quantized.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], activation: str, comm: Comm, ops: Ops) -> None:
        super().__init__()
        gate, gate_up, down = matrices
        self.activation = activation
        self.gate = build_matrix(gate, LocalComm(), ops)
        self.gate_up = build_matrix(gate_up, comm, ops)
        self.down = build_matrix(down, comm, ops)

    def forward(self, x: Tensor) -> Tensor:
        """[t, hidden] to the rank's part of [t, hidden], before the gate."""
        return self.down.product(self.gate_up.gated(self.gate_up.take(x), self.activation, self.down))

    def pass_through(self, x: Tensor) -> ExpertOfAll:
        """Returns what it makes of tokens [t, hidden], which is yet to be computed, and its gate."""
        gate = self.gate.plain
        assert gate is not None
        return ExpertOfAll(partial(self, x), gate)

    def uses(self) -> Iterator[MatrixUse]:
        yield MatrixUse(self.gate_up, self.activation)
        yield MatrixUse(self.down)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.gate.parts()
        yield from self.gate_up.parts()
        yield from self.down.parts()
