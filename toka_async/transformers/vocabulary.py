"""A foreign model's embedding and head as matrices of ours, which tensor ranks divide, or as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.comm import Comm
from toka_async.model.layers import VocabularyMatrix
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart
from toka_async.model.matrices.share import share_of


class Head(Protocol):
    """own: scores the rank's share of the rows instead of all of them."""

    own: bool


class VocabularyEmbedding(nn.Module):
    """In the place of an `nn.Embedding`."""

    def __init__(self, matrix: VocabularyMatrix, layouts: LayoutPolicy) -> None:
        super().__init__()
        self.matrix = matrix
        self.layouts = layouts

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [1, t] to [1, t, dim]."""
        return self.matrix.embed(token_ids[0], self.layouts.choose(token_ids.shape[1]))[None]

    def list_parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.matrix.parts()


class VocabularyHead(nn.Module):
    """In the place of an `nn.Linear` without a bias. own: scores the rank's rows only."""

    def __init__(self, matrix: VocabularyMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.own = False

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, s, dim] to [1, s or s / ranks, ids]."""
        return (self.matrix.own_logits(hidden[0]) if self.own else self.matrix.logits(hidden[0]))[None]

    def list_parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.matrix.parts()


class WholeHead:
    """Scores with a head that every rank has all of: with a bias, or tied to an embedding that does more than embed."""

    def __init__(self, head: Any, comm: Comm, *, fp32: bool) -> None:
        """head: an `nn.Linear`, whose place this takes."""
        self.own = False
        self._head = head
        self._comm = comm
        self._fp32 = fp32
        head.forward = self._score

    def _score(self, hidden: Tensor) -> Tensor:
        """[1, s, dim] to [1, s or s / ranks, ids]."""
        if self.own:
            hidden = hidden[:, share_of(hidden.shape[1], self._comm).indices]
        weight, bias = self._head.weight, self._head.bias
        if not self._fp32:
            return F.linear(hidden, weight, bias)
        return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def make_vocabulary_matrix(
    module: nn.Embedding | nn.Linear, name: str, comm: Comm, ops: Ops, *, fp32: bool
) -> VocabularyMatrix:
    """Makes unset rows in the place of a module's. name: of the module in a checkpoint."""
    num_rows, dim = module.weight.shape
    spec = MatrixSpec(names=(name,), outputs=(Units(num_rows),), inputs=Units(dim), split="outputs")
    return VocabularyMatrix(spec, comm, ops, fp32=fp32)


def can_divide_vocabulary(embedding: nn.Module, head: nn.Module) -> bool:
    """Tells whether both compute nothing but what `VocabularyMatrix` does."""
    plain_embedding = type(embedding) is nn.Embedding and embedding.max_norm is None
    return plain_embedding and type(head) is nn.Linear and head.bias is None
