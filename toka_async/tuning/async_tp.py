"""Decides which steps tensor ranks compute in shards of tokens, so that collectives overlap with products.

The configuration says so, or a layer's time is measured both ways at a handful of token counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch, QueryKeyNorm
from toka_async.bar import Show, show_nothing
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import ActivationLayout, LayoutPolicy, Replicated, SequenceSharded
from toka_async.model.comm import Comm
from toka_async.model.decoder import Decoder
from toka_async.model.matrices.ops import Ops
from toka_async.model.overlap import build_overlapped, explain_obstacle, release, reserve
from toka_async.model.weights import build_decoder, random_weights
from toka_async.tuning.clock import time_alone
from toka_async.tuning.settle import settle
from toka_async.tuning.store import Facts, TuningCache

logger = logging.getLogger(__name__)

MARGIN = 1.02  # a smaller gain may be chance
_LEAST_TOKENS = 512  # fewer gain nothing
LAYERS = 8  # layers timed together, so that the host gets ahead of the device
_ROUNDS = 3

# Milliseconds of a run.
RunClock = Callable[["LayerRun"], float]
# Finds the fastest products of a decoder's layers, for steps of these numbers of tokens.
Tune = Callable[[Decoder, Sequence[int]], None]


@dataclass(slots=True, frozen=True)
class Timing:
    """Milliseconds of a layer at `num_tokens`, with all tokens on each rank, and in shards."""

    num_tokens: int
    whole: float
    shards: float


@dataclass(slots=True, frozen=True)
class RankShape:
    """The shape of a rank's layers. spec: of the whole model. max_tokens: of one step."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    max_tokens: int


def count_workspace_bytes(spec: ModelSpec, dtype: torch.dtype, max_tokens: int, num_ranks: int) -> int:
    """Counts the bytes that ranks read of each other: two parts of an output, of their share of a step's tokens."""
    return 2 * -(-max_tokens // num_ranks) * spec.hidden_size * dtype.itemsize


def build_layouts(
    asked: int | Literal["auto"],
    comm: Comm,
    shape: RankShape,
    most_captured: int,
    cache: TuningCache,
    world: Comm | None = None,
    tune: Tune | None = None,
    clock: RunClock = time_alone,
    show: Show = show_nothing,
) -> LayoutPolicy:
    """Decides how steps are spread over the ranks. All ranks decide alike; they wait for each other.

    comm: the ranks that hold the same layers. world: the ranks of all stages; None: there is one stage. asked:
    `parallel.async_tp_min_tokens`. most_captured: tokens of the largest captured step. Only larger steps are measured,
    as a captured step costs the host no time. tune: called with the numbers of tokens before they are measured, so that
    products are as fast as they will be when serving. In shards, each rank has more than one token.
    """
    whole, world = Replicated(comm), world or comm
    if comm.size == 1 or asked == 0:
        return LayoutPolicy(whole)
    reason = explain_obstacle(comm, shape.device) or reserve(
        comm, count_workspace_bytes(shape.spec, shape.dtype, shape.max_tokens, comm.size)
    )
    if not world.minimum(int(not reason)):
        reason = reason or "another stage's GPUs cannot"
    if reason:
        return _fall_back(asked, comm, world, reason)
    shards = build_overlapped(comm)
    if asked != "auto":
        return LayoutPolicy(whole, shards, _raise_least(asked, comm))
    counts = list_token_counts(most_captured, shape.max_tokens)
    timings = settle(LayoutTimes(shape, shards, comm, world, counts, tune, clock, show), cache, world) if counts else []
    if shape.device.type == "cuda":
        torch.cuda.empty_cache()  # frees what measuring took
    least = find_least_tokens(timings)
    _report(world, least, timings)
    if not least:
        release(comm)
        return LayoutPolicy(whole)
    return LayoutPolicy(whole, shards, least)


@dataclass(slots=True, frozen=True)
class LayoutTimes:
    """The `Choice` that times a layer both ways at some token counts, to find from which count on shards are faster."""

    shape: RankShape
    shards: ActivationLayout
    comm: Comm
    world: Comm
    counts: Sequence[int]
    tune: Tune | None
    clock: RunClock
    show: Show
    name: ClassVar[str] = "async-tp"
    kind: ClassVar[Any] = list[Timing]

    def describe(self) -> Facts:
        return {
            "model": _cut_to_one_layer(self.shape.spec),
            "dtype": str(self.shape.dtype),
            "ranks": [self.comm.size, self.world.size],
            "tokens": list(self.counts),
        }

    def admits(self, answer: Sequence[Timing]) -> bool:
        return [timing.num_tokens for timing in answer] == [*self.counts]

    def measure(self) -> list[Timing]:
        """Measures a layer of random weights without attention, both ways in turns. Returns medians."""
        shape, comm = self.shape, self.comm
        decoder = build_decoder(_cut_to_one_layer(shape.spec), shape.dtype, shape.device, comm, shape.ops)
        random_weights(decoder, seed=comm.rank)
        if self.tune is not None:
            self.tune(decoder, self.counts)
        timings = []
        for done, count in enumerate(self.counts):
            self.show(done, len(self.counts), "sizes of steps measured")
            of_whole = LayerRun(decoder, Replicated(comm), count, count)
            of_shards = LayerRun(decoder, self.shards, count, -(-count // comm.size))
            for run in (of_whole, of_shards):
                run()  # first use compiles and loads
            rounds = [[self._time(run) for run in (of_whole, of_shards)] for _ in range(_ROUNDS)]
            timings.append(Timing(count, *(median(times) / LAYERS for times in zip(*rounds, strict=True))))
        return timings

    def _time(self, run: LayerRun) -> float:
        self.comm.minimum(0)  # ranks begin together
        return self.clock(run)


def _cut_to_one_layer(spec: ModelSpec) -> ModelSpec:
    """Returns the model with its first layer that has attention alone."""
    first = next(layer for layer in spec.layers if layer.mixer is spec.attention)
    return msgspec.structs.replace(spec, layers=(msgspec.structs.replace(first, input=None),), layer_inputs=0)


def _fall_back(asked: int | Literal["auto"], comm: Comm, world: Comm, reason: str) -> LayoutPolicy:
    """Refuses overlap: `auto` becomes never, a number stands, and collectives run after products."""
    if asked == "auto":
        if world.rank == 0:
            logger.info("async TP: never: %s", reason)
        return LayoutPolicy(Replicated(comm))
    least = _raise_least(asked, comm)
    if world.rank == 0:
        logger.warning(
            "parallel.async_tp_min_tokens=%d: steps from %d tokens on are in shards, but nothing overlaps: %s",
            asked,
            least,
            reason,
        )
    return LayoutPolicy(Replicated(comm), SequenceSharded(comm), least)


def _raise_least(asked: int, comm: Comm) -> int:
    """Returns the smallest step of at least so many tokens that gives each rank more than one."""
    return max(asked, comm.size + 1)


def _report(comm: Comm, least: int, timings: Sequence[Timing]) -> None:
    if comm.rank == 0:
        times = ", ".join(f"{t.num_tokens}: {t.whole:.3f} {t.shards:.3f}" for t in timings)
        when = f"from {least} tokens a step" if least else "never"
        logger.info("async TP: %s; ms of a layer by tokens, without and with: %s", when, times or "not measured")


def list_token_counts(most_captured: int, max_tokens: int) -> list[int]:
    """Lists the counts to measure: powers of two above the captured steps."""
    counts = [_LEAST_TOKENS << doubled for doubled in range(32)]
    return [count for count in counts if most_captured < count <= max_tokens]


def find_least_tokens(timings: Sequence[Timing]) -> int:
    """Finds the least count from which on shards are faster by the margin; 0 if there is none."""
    least = 0
    for timing in sorted(timings, key=lambda timing: -timing.num_tokens):
        if timing.shards * MARGIN > timing.whole:
            break
        least = timing.num_tokens
    return least


class LayerRun:
    """Computes a step's layers one after the other: `num_tokens`, of which the rank has `num_own`."""

    def __init__(self, decoder: Decoder, layout: ActivationLayout, num_tokens: int, num_own: int) -> None:
        assert decoder.norm is not None
        norm = decoder.norm.weight
        self._layer = decoder.layers[0]
        self.layout = layout
        self.num_tokens = num_tokens
        self._hidden = torch.randn(num_own, norm.numel(), dtype=norm.dtype, device=norm.device)
        self._rotations = decoder.rotate(torch.arange(num_tokens, device=norm.device), norm.dtype)
        self._attention = NoAttention(decoder.num_heads)

    @torch.inference_mode()
    def __call__(self) -> None:
        for _ in range(LAYERS):
            self._layer(self._hidden, self._hidden, self._rotations, self._attention, self.layout)


class NoAttention:
    """Returns the queries."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads

    def plan(self, batch: AttentionBatch) -> None:
        raise AssertionError(f"nothing is planned, such as {batch}")

    def attend(
        self,
        layer: int,  # noqa: ARG002
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],  # noqa: ARG002
        norm: QueryKeyNorm | None = None,  # noqa: ARG002
        sinks: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        return heads[:, : self._num_heads]
