"""torch.compile of a decoder's forward pass, end to end: one graph for any number of tokens, attention an opaque call.

The decoder should be built with `TorchOps`, which the compiler fuses itself. Knows no rows and no step; who calls
warms up each kind of shape (a single token, which torch specialises; the most tokens) and then freezes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toka_async.attention.base import AttentionBackend, AttentionBatch, QueryKeyNorm
from toka_async.model.decoder import Decoder
from toka_async.model.operators import Operators

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry


class CompiledForward:
    """`Decoder.forward` over one attention backend, compiled; what is not compiled by the freeze runs eagerly."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, compiler: str = "inductor") -> None:
        """compiler: torch.compile's backend; others than inductor are of use to tests."""
        self.num_eager = 0  # calls that ran uncompiled: none of the shapes of before the freeze fitted
        self.frozen = False
        op = OpAttention(attention, decoder.num_heads)

        def forward(inputs: Tensor, positions: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                self.num_eager += 1
            hidden: Tensor = decoder(inputs, positions, op)
            return hidden

        # Graphs are kept with the code: code of its own, or other models of this process would run this one's.
        forward.__code__ = forward.__code__.replace(co_name=f"forward_{op.name}")
        self.forward: Callable[[Tensor, Tensor], Tensor] = torch.compile(
            forward, backend=compiler, dynamic=True, fullgraph=True, options={"guard_filter_fn": _keep_argument_guards}
        )

    @torch.inference_mode()
    def __call__(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """As `Decoder.forward` of all tokens, t > 0: inputs and positions, contiguous, to hidden states [t, hidden]."""
        inputs, positions = _inference_tensor(inputs), _inference_tensor(positions)
        if not self.frozen:
            return self.forward(inputs, positions)
        with torch.compiler.set_stance("eager_on_recompile"):
            return self.forward(inputs, positions)

    def freeze(self) -> None:
        """Compile nothing from here on."""
        self.frozen = True


def compile_forward(decoder: Decoder, attention: AttentionBackend) -> CompiledForward:
    """The decoder's forward pass as one compiled call; compilation happens in the first calls."""
    return CompiledForward(decoder, attention)


def _inference_tensor(x: Tensor) -> Tensor:
    """A copy of what was made outside of inference mode, which is a kind of its own to the compiler."""
    return x if x.is_inference() else x.clone()


def _keep_argument_guards(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Which guards each call checks: those of its tensors and of torch's modes, which have no name.

    The decoder stays as it is once compiled; to check each of its parameters in every call would take a millisecond.
    """
    return [not guard.name or "inputs" in guard.name or "positions" in guard.name for guard in guards]


def num_compiles() -> int:
    """Graphs that torch.compile has made in this process, recompilations among them."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes a second
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class OpAttention:
    """An attention backend as one operator for all layers."""

    def __init__(self, attention: AttentionBackend, num_heads: int) -> None:
        def attend(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, layer: int) -> Tensor:
            norm = None if weight is None else QueryKeyNorm(weight, eps)
            return attention.attend(layer, heads, (cos, sin), norm)

        def shape_only(heads: Tensor, *_: object) -> Tensor:
            return heads.new_empty(heads.shape[0], num_heads, heads.shape[2])

        self.operators = Operators()
        signature = "(Tensor heads, Tensor cos, Tensor sin, Tensor? weight, float eps, int layer) -> Tensor"
        self.name, self.op = self.operators.add("attend", signature, attend, shape_only)
        self.backend = attention

    def plan(self, batch: AttentionBatch) -> None:
        self.backend.plan(batch)

    def attend(
        self, layer: int, heads: Tensor, rotation: tuple[Tensor, Tensor], norm: QueryKeyNorm | None = None
    ) -> Tensor:
        cos, sin = rotation
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        output: Tensor = self.op(heads, cos, sin, weight, eps, layer)
        return output
