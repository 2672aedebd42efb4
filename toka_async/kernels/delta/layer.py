"""The shapes and weights of a Gated DeltaNet layer (arXiv:2412.06464), as what computes with states takes them.

A token's queries, keys and values pass a short convolution; queries and keys have length 1. Each value head has a state
S [key_dim, value_dim], which decays by exp(g), then learns a value with the rate beta: S += k (beta (v - Sᵀ k))ᵀ. The
output Sᵀ q is normed and gated. Loads no Triton, which is not everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class DeltaShape:
    """A layer's heads on a rank. Consecutive value heads share a key head. width: tokens that a convolution sees."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def num_keys(self) -> int:
        """Values of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def num_values(self) -> int:
        """Values of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Values of queries, keys and values, which are convolved."""
        return 2 * self.num_keys + self.num_values


@dataclass(slots=True, frozen=True)
class Programs:
    """How many programs there are, each of which takes several if there are more.

    pieces: of each head. chunks: of each part of the channels, whose newest inputs are kept. readers: of each part of a
    head's state, which is taken through chunks.
    """

    pieces: int
    chunks: int
    readers: int

    def limit(self, num_pieces: int, num_chunks: int) -> Programs:
        """Leaves out programs for more pieces and chunks than so many."""
        return Programs(min(self.pieces, num_pieces), min(self.chunks, num_chunks), min(self.readers, num_chunks))


@dataclass(slots=True, frozen=True)
class StepChunks:
    """A step's chunks of prompts, cut into pieces, on the device.

    counts: int32 [4]: pieces, chunks, and how many of the programs that are started take pieces and read chunks.
    pieces: int32 [p, 3]: a piece's first token in the step, its tokens, and the number of the state in which the one
    behind it is kept, or -1. chunks: int32 [k, 3]: a chunk's first piece, its pieces, and its slot. slots, offsets:
    int32 [t], of each token: its chunk's slot and its place in the chunk, from 1; 0: it is in none.
    """

    counts: Tensor
    pieces: Tensor
    chunks: Tensor
    slots: Tensor
    offsets: Tensor
    programs: Programs


@dataclass(slots=True, frozen=True)
class DeltaWeights:
    """A layer's parameters beside its matrices.

    convolution: [channels, width]. log_decay, time_bias: float32 [value heads]: g is -exp(log_decay) * softplus(a +
    time_bias), where a is a token's. norm: [value_dim], of each value head's output. eps: of that norm.
    """

    convolution: Tensor
    log_decay: Tensor
    time_bias: Tensor
    norm: Tensor
    eps: float
