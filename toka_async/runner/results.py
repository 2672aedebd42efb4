"""Makes a step's results one message, with one copy to the host, for which nobody waits before it is due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toka_async.arrays import EMPTY, Float32, Int32, Int64, column, i32_column
from toka_async.messages import ChunkLogprobs, ExpertLoads, MaskWork, StepDone
from toka_async.model.load_counter import LoadReading
from toka_async.model.logprobs import Logprobs
from toka_async.runner.clock import StepClock, StepSpan, measure_between
from toka_async.runner.copies import Download
from toka_async.runner.masks import MaskedDraw
from toka_async.runner.prompt_logprobs import AskedChunk
from toka_async.runner.samples import Draws, TopLogprobs


class PartResults:
    """A micro-batch's results on their way to the host. places: int64 [s], among the step's; None: it has all.

    download: brings the sampled ids first.
    """

    def __init__(
        self,
        samples: Draws | None,
        asked: Sequence[AskedChunk] = (),
        of_chunks: Logprobs | None = None,
        places: Int64 | None = None,
        masked: MaskedDraw | None = None,
    ) -> None:
        """masked: the part's rows with a grammar."""
        self.places = places
        self.masked = masked
        self.tops = () if samples is None else samples.tops
        self.has_kept = samples is not None and samples.kept is not None
        self._asked = asked
        tensors = [] if samples is None else samples.list_tensors()
        self._num_own = len(tensors)
        self.download = Download([*tensors, *_list_tensors(of_chunks)])

    def collect(self) -> tuple[list[npt.NDArray[Any]], tuple[ChunkLogprobs, ...]]:
        """Waits for what the part sampled, in the order of `Draws.list_tensors`, and for prompts' log-probs."""
        arrays = self.download.collect()
        own, of_chunks = arrays[: self._num_own], arrays[self._num_own :]
        return own, _cut_chunks(self._asked, *of_chunks) if of_chunks else ()


class LaunchedLoads:
    """Counts of experts' tokens that the device copies to the host."""

    def __init__(self, reading: LoadReading) -> None:
        self._layers = reading.layers
        self._counts = Download(reading.counts)

    def collect(self) -> ExpertLoads:
        """Waits for the counts."""
        return ExpertLoads(self._layers, tuple(map(column, self._counts.collect())))


class LaunchedStep:
    """A step that the device computes, in parts. `collect` must be called in the order of launching."""

    def __init__(
        self,
        step_id: int,
        parts: Sequence[PartResults],
        clock: StepClock,
        span: StepSpan,
        num_compiles: int,
        loads: LoadReading | None = None,
    ) -> None:
        """loads: read after the step."""
        self._step_id = step_id
        self._parts = parts
        self._clock = clock
        self._num_compiles = num_compiles
        self._loads = None if loads is None else LaunchedLoads(loads)
        self._span = clock.end(span)

    def collect(self) -> StepDone:
        """Waits for what the step sampled, and for the log-probs of prompts."""
        collected = [part.collect() for part in self._parts]
        seconds, waited = self._clock.measure(self._span)
        done = StepDone(
            step_id=self._step_id,
            token_ids=EMPTY,
            prompts=tuple(chunk for _, chunks in collected for chunk in chunks),
            seconds=seconds,
            waited=waited,
            stalled=self._clock.measure_stalls(self._span),
            num_compiles=self._num_compiles,
            loads=None if self._loads is None else self._loads.collect(),
        )
        if any(part.masked is not None for part in self._parts):
            done = self._add_masks(done)
        sampled = [(part, own) for part, (own, _) in zip(self._parts, collected, strict=True) if own]
        if not sampled:
            return done
        places = [part.places for part, _ in sampled]
        tokens = _put_in_order([own[0] for _, own in sampled], places)
        done = msgspec.structs.replace(done, token_ids=column(tokens))
        if all(len(own) < 2 for _, own in sampled):
            return done
        chosen = [own[1] if len(own) > 1 else np.zeros(own[0].size, np.float32) for _, own in sampled]
        done = msgspec.structs.replace(done, logprobs=column(_put_in_order(chosen, places)))
        if any(part.has_kept for part, _ in sampled):
            done = _add_kept(done, sampled, places)
        tops = [
            _read_top(part, top, *own[2 * number : 2 * number + 2])
            for part, own in sampled
            for number, top in enumerate(part.tops, start=2 if part.has_kept else 1)
        ]
        return _add_top(done, tops) if tops else done

    def _add_masks(self, done: StepDone) -> StepDone:
        """Adds rows whose grammar failed, and what masks took. The parts are computed."""
        masked = [(part, part.masked) for part in self._parts if part.masked is not None]
        broken = [
            draw.broken if part.places is None else part.places[draw.broken].tolist()
            for part, draw in masked
            if draw.broken
        ]
        work = MaskWork(
            sum(draw.places.size for _, draw in masked),
            sum(draw.seconds for _, draw in masked),
            sum(measure_between(*draw.stall) for _, draw in masked if draw.stall is not None),
        )
        return msgspec.structs.replace(done, broken=i32_column(chain.from_iterable(broken)), masks=work)


def _put_in_order(parts: Sequence[npt.NDArray[Any]], places: Sequence[Int64 | None]) -> npt.NDArray[Any]:
    """Puts the parts' values in the step's order."""
    if places[0] is None:
        (values,) = parts
        return values
    ordered = np.empty(sum(part.size for part in parts), parts[0].dtype)
    for part, at in zip(parts, places, strict=True):
        ordered[at] = part
    return ordered


def _add_kept(
    done: StepDone, sampled: Sequence[tuple[PartResults, list[npt.NDArray[Any]]]], places: Sequence[Int64 | None]
) -> StepDone:
    """Adds what filters keep; in parts that did not measure it, no row has filters."""
    kept = [own[2] if part.has_kept else np.zeros(own[0].size, np.int32) for part, own in sampled]
    masses = [own[3] if part.has_kept else np.ones(own[0].size, np.float32) for part, own in sampled]
    return msgspec.structs.replace(
        done, kept=column(_put_in_order(kept, places)), masses=column(_put_in_order(masses, places))
    )


def _list_tensors(logprobs: Logprobs | None) -> list[Tensor]:
    """Lists the tensors of prompts' log-probs, whose tokens have ranks."""
    if logprobs is None:
        return []
    assert logprobs.ranks is not None
    return [logprobs.chosen, logprobs.top_ids.to(torch.int32), logprobs.top, logprobs.ranks]


@dataclass(slots=True, frozen=True)
class _Top:
    """Rows int64 [m], the number of likeliest ids of each, int32 [m], and ids and log-probs, row after row."""

    rows: Int64
    counts: Int32
    ids: Int32
    values: Float32


def _read_top(part: PartResults, top: TopLogprobs, ids: Int32, values: Float32) -> _Top:
    """Reads likeliest tokens from arrays [m, k] of rows that ask for them, or [s, k] of all rows."""
    if top.of_all and len(ids) > top.rows.size:
        ids, values = ids[top.rows], values[top.rows]
    counts = np.minimum(top.counts, values.shape[1])
    wanted = np.arange(values.shape[1]) < counts[:, None]
    has_top = counts > 0
    rows = top.rows[has_top] if part.places is None else part.places[top.rows[has_top]]
    return _Top(rows, counts[has_top], ids[wanted], values[wanted])


def _add_top(done: StepDone, tops: Sequence[_Top]) -> StepDone:
    """Adds the likeliest tokens, with rows in the step's order."""
    rows, counts, ids, values = (np.concatenate([getattr(top, name) for top in tops]) for name in _Top.__slots__)
    if (rows[1:] < rows[:-1]).any():
        order, each = np.argsort(rows, kind="stable"), np.argsort(np.repeat(rows, counts), kind="stable")
        rows, counts, ids, values = rows[order], counts[order], ids[each], values[each]
    return msgspec.structs.replace(
        done,
        top_rows=column(rows.astype(np.int32)),
        top_counts=column(counts),
        top_ids=column(ids),
        top_logprobs=column(values),
    )


def _cut_chunks(
    asked: Sequence[AskedChunk], chosen: Float32, top_ids: Int32, top: Float32, ranks: Int32
) -> tuple[ChunkLogprobs, ...]:
    """Cuts arrays of all chunks, one after the other, into messages."""
    messages = []
    first = 0
    for chunk in asked:
        part = slice(first, first + chunk.next_ids.size)
        num_top = min(chunk.num_top, top.shape[1])
        messages.append(
            ChunkLogprobs(
                slot=chunk.slot,
                start=chunk.start,
                logprobs=column(chosen[part]),
                ranks=column(ranks[part]),
                num_top=num_top,
                top_ids=column(top_ids[part, :num_top]),
                top_logprobs=column(top[part, :num_top]),
            )
        )
        first = part.stop
    return tuple(messages)
