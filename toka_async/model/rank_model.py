"""What a start, weights and trainers need of a rank's model: `RankModel`, whoever computes its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from toka_async.attention.base import AttentionBackend
from toka_async.checkpoint.division import StagePart
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.decoder import Layer
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.part import WeightPart


class RankModel(Protocol):
    """A decoder-only model, or one stage of it, on one tensor rank: an nn.Module. `Decoder` says what methods do."""

    @property
    def layouts(self) -> LayoutPolicy: ...

    @property
    def part(self) -> StagePart: ...

    @property
    def embedding(self) -> object | None:
        """None: another stage has it."""
        ...

    @property
    def head(self) -> object | None:
        """None: another stage has it."""
        ...

    def forward(
        self, inputs: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor: ...

    def begin(self, inputs: Tensor, positions: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]: ...

    def finish(self, attended: Tensor, residual: Tensor, wanted: Tensor | None = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def own_logits(self, hidden: Tensor) -> Tensor: ...

    def uses(self) -> Iterator[MatrixUse]: ...

    def parts(self) -> Iterator[tuple[str, WeightPart]]: ...

    def find_part(self, name: str) -> str:
        """Returns the name among `parts` of a checkpoint's tensor, which may have another name there."""
        ...

    def needs_place(self, name: str) -> bool:
        """Tells whether a checkpoint's tensor that is not among `parts` is a mistake: it belongs to these layers."""
        ...

    def list_layers(self) -> Sequence[Layer]:
        """Returns the layers that are ours."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...
