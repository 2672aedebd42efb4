"""A rank without a model: takes the same steps as a real one and answers with pseudo-random token ids.

It serves to measure everything but the model. A row's tokens depend on its seed and position alone, so the same request
gets the same answer however it is batched. Loads no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from toka_async.arrays import (
    EMPTY,
    Bool,
    Int32,
    as_bool,
    as_i32,
    as_i64,
    column,
    f32_column,
    group_places,
    i32_column,
    next_rows,
)
from toka_async.checkpoint.limits import PageBytes, resolve_limits, resolve_num_pages, resolve_num_window_pages
from toka_async.checkpoint.spec import ModelSpec
from toka_async.config import CacheConfig, ModelConfig, ScheduleConfig, SimulatedConfig
from toka_async.control import Control, ControlDone, Sleep, Wake
from toka_async.grammars.matchers import GrammarRow, RowMatchers
from toka_async.messages import ChunkLogprobs, Prompt, Ready, Step, StepDone, TokenSampling

Want = tuple[bytes, int, int, int]  # end ids, min_tokens, num_logprobs, num_prompt_logprobs
UInt64 = npt.NDArray[np.uint64]

AUTO_TOKENS = 4096  # of the cache for each of max_seqs sequences, at most
HALF = np.uint64(32)
LEAST = -1.0  # the highest log-prob; the next likeliest token is always 1 less likely, so that their sum is below 1


def make_simulated_ready(spec: ModelSpec, model: ModelConfig, cache: CacheConfig, schedule: ScheduleConfig) -> Ready:
    """Makes Ready: everything fits that is asked for. Raises ModelError for an impossible limit."""
    limits = resolve_limits(model, schedule, spec, "simulated")
    auto_pages = limits.max_seqs * -(-min(limits.max_context, AUTO_TOKENS) // cache.page_size)
    num_pages = resolve_num_pages(cache, limits, PageBytes(1), auto_bytes=auto_pages, most_bytes=2**31 - 1)
    window = spec.fit_context(limits.max_context).window
    return Ready(
        num_pages=num_pages,
        page_size=cache.page_size,
        max_seqs=limits.max_seqs,
        max_context=min(limits.max_context, num_pages * cache.page_size),
        vocab_size=spec.vocab_size,
        max_tokens=limits.max_tokens,
        num_window_pages=resolve_num_window_pages(cache, limits, window, num_pages),
        window=window,
    )


class SimulatedRank:
    """Keeps the row order and the positions of rows, and draws tokens.

    Args:
        ready: what fits; no slot is above its max_seqs.
        simulated: how long a step takes, and how often a row ends.
        clock, sleep: seconds.
        matchers: of rows with a grammar; None: no row may have one.
    """

    def __init__(
        self,
        ready: Ready,
        simulated: SimulatedConfig,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        matchers: RowMatchers | None = None,
    ) -> None:
        self.ready = ready
        self._simulated = simulated
        self._end_below = np.uint64(min(round(simulated.end_rate * 2**32), 2**32))
        self._matchers = matchers
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0  # when the step before this one ended
        self._order: Int32 = np.empty(0, np.int32)
        self._prompts: dict[int, Prompt] = {}
        slots = ready.max_seqs
        self._seeds: UInt64 = np.zeros(slots, np.uint64)
        self._positions: UInt64 = np.zeros(slots, np.uint64)
        self._first_end: UInt64 = np.zeros(slots, np.uint64)  # first position at which a row may end
        self._ends: Int32 = np.full((1, slots), -1, np.int32)  # [e, slots]: ids that end the row, -1 after them
        self._num_ends: UInt64 = np.zeros(slots, np.uint64)
        self._num_prompt: Int32 = np.zeros(slots, np.int32)
        self._num_logprobs: Int32 = np.full(slots, -1, np.int32)
        self._num_prompt_logprobs: Int32 = np.full(slots, -1, np.int32)

    def wait(self) -> None:
        """Notes that no step is queued: the next one starts when it comes, not when the last one ended."""
        self._free_at = 0.0

    def control(self, control: Control, rank: int) -> ControlDone:
        """Refuses what needs weights; there is no cache whose memory could be given back."""
        is_fine = isinstance(control.action, Sleep | Wake)
        error = "" if is_fine else "model.device=simulated has no weights"
        return ControlDone(number=control.number, rank=rank, error=error)

    def run(self, step: Step) -> StepDone:
        """Runs one step. Sleeps until its time is over; a queued step starts at the end of the one before."""
        began = self._free_at or self._clock()
        self._apply(step)
        chunk_slots, lengths = as_i32(step.chunk_slots), as_i32(step.chunk_lengths)
        starts = self._positions[chunk_slots]
        slots = np.concatenate([self._order, chunk_slots])
        positions = self._positions.take(slots)
        positions += np.uint64(1)
        num_keys = int(positions[: self._order.size].sum())
        positions[self._order.size :] = starts + lengths.astype(np.uint64)
        self._positions[slots] = positions
        if step.chunk_slots:
            sampling = np.concatenate([np.ones(self._order.size, np.bool_), as_bool(step.chunk_samples)])
            slots, positions = slots[sampling], positions[sampling]
        token_ids = self._draw(slots, positions)
        broken = [] if self._matchers is None else self._keep_to_grammars(self._matchers, slots, token_ids)
        logprobs, tops = self._make_logprobs(slots, token_ids)
        prompts = self._score(chunk_slots, starts.astype(np.int64).tolist(), lengths.tolist())
        self._free_at = began + self._count_seconds(step, self._order.size + int(lengths.sum()), num_keys)
        if (left := self._free_at - self._clock()) > 0:
            self._sleep(left)
        else:
            self._free_at = self._clock()
        return StepDone(
            step_id=step.step_id,
            token_ids=column(token_ids),
            logprobs=logprobs,
            top_rows=tops[0],
            top_counts=tops[1],
            top_ids=tops[2],
            top_logprobs=tops[3],
            prompts=prompts,
            seconds=self._free_at - began,
            broken=i32_column(broken),
        )

    def _count_seconds(self, step: Step, num_tokens: int, num_keys: int) -> float:
        """Counts the seconds of a step whose decoding rows have `num_keys` keys; a group reads its shared ones once."""
        num_spared = int(((as_i32(step.group_rows) - 1) * as_i32(step.group_pages)).sum()) * self.ready.page_size
        times = self._simulated
        return times.step_ms / 1e3 + times.token_us / 1e6 * num_tokens + times.key_ns / 1e9 * (num_keys - num_spared)

    # ---- events

    def _apply(self, step: Step) -> None:
        for key in as_i32(step.dropped_prompts).tolist():
            del self._prompts[key]
        for prompt in step.prompts:
            self._prompts[prompt.key] = prompt
        if self._matchers is not None:
            self._matchers.free(as_i32(step.freed))
        if step.admit_slots:
            self._admit(step)
        self._order = next_rows(self._order, as_i32(step.freed), as_i32(step.joined))
        if step.order:
            self._order = as_i32(step.order)

    def _admit(self, step: Step) -> None:
        slots, keys = as_i32(step.admit_slots), as_i32(step.admit_keys)
        self._positions[slots] = as_i32(step.admit_starts)
        self._seeds[slots] = as_i64(step.admit_seeds).view(np.uint64)
        prompts = [self._prompts[key] for key in keys.tolist()]
        self._num_prompt[slots] = [prompt.num_prompt for prompt in prompts]
        if self._matchers is not None:
            self._matchers.free(slots)
            self._matchers.admit(
                [
                    GrammarRow(slot, prompt.sampling.grammar, as_i32(prompt.token_ids)[prompt.num_prompt :], 0)
                    for slot, prompt in zip(slots.tolist(), prompts, strict=True)
                    if prompt.sampling.grammar
                ]
            )
        for want, rows in group_places(read_wants(prompt.sampling) for prompt in prompts).items():
            self._describe(slots[rows], want)

    def _describe(self, slots: Int32, want: Want) -> None:
        """Notes what rows that want the same want."""
        end_ids, min_tokens, num_logprobs, num_prompt_logprobs = want
        ends = np.frombuffer(end_ids, np.int32)
        ends = np.unique(ends[(ends >= 0) & (ends < self.ready.vocab_size)])
        if (missing := ends.size - len(self._ends)) > 0:
            self._ends = np.concatenate([self._ends, np.full((missing, self.ready.max_seqs), -1, np.int32)])
        self._ends[:, slots] = -1
        self._ends[: ends.size, slots] = ends[:, None]
        self._num_ends[slots] = ends.size
        self._first_end[slots] = self._num_prompt[slots] + min_tokens
        self._num_logprobs[slots] = min(num_logprobs, self.ready.vocab_size)
        self._num_prompt_logprobs[slots] = min(num_prompt_logprobs, self.ready.vocab_size)

    # ---- results

    def _draw(self, slots: Int32, positions: UInt64) -> Int32:
        """Draws a token of each slot for its position, [s]: an end id at `end_rate`, otherwise any other id."""
        bits = draw_bits(self._seeds.take(slots), positions)
        token_ids = (((bits >> HALF) * np.uint64(self.ready.vocab_size)) >> HALF).astype(np.int32)
        ends = self._ends.take(slots, axis=1)
        for _ in range(len(ends) + 1):  # the ids after an end may be ends too
            hits = np.flatnonzero((token_ids == ends).any(axis=0))
            if not hits.size:
                break
            token_ids[hits] = (token_ids[hits] + 1) % self.ready.vocab_size
        if self._end_below:
            rows = np.flatnonzero((bits & np.uint64(0xFFFFFFFF)) < self._end_below)
            num_ends = self._num_ends[slots[rows]]
            may_end = (positions[rows] >= self._first_end[slots[rows]]) & (num_ends > 0)
            rows, num_ends = rows[may_end], num_ends[may_end]
            token_ids[rows] = ends[bits[rows] % num_ends, rows]
        return token_ids

    def _keep_to_grammars(self, matchers: RowMatchers, slots: Int32, token_ids: Int32) -> list[int]:
        """Replaces drawn tokens [s] that a row's grammar forbids by the next one that it allows.

        Returns the places of rows whose grammar failed.
        """
        places = matchers.find(slots)
        if not places.size:
            return []
        rows = matchers.take(slots[places])
        masks = np.zeros((places.size, matchers.num_words), np.int32)
        broken = matchers.fill(rows, masks)
        allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : self.ready.vocab_size]
        distance = (np.arange(self.ready.vocab_size) - token_ids[places, None]) % self.ready.vocab_size
        chosen = np.where(allowed != 0, distance, self.ready.vocab_size).argmin(1).astype(np.int32)
        token_ids[places] = chosen
        matchers.advance(rows, chosen)
        return [int(places[place]) for place in broken]

    def _make_logprobs(self, slots: Int32, token_ids: Int32) -> tuple[memoryview, tuple[memoryview, ...]]:
        """Makes columns of the chosen tokens, [s] if any row asks, and of the likeliest: rows, counts, ids, values."""
        wanted = self._num_logprobs.take(slots)
        asked: Bool = wanted >= 0
        if not asked.any():
            return EMPTY, (EMPTY, EMPTY, EMPTY, EMPTY)
        rows = np.flatnonzero(wanted > 0)
        counts = wanted[rows]
        ids, values = rank_tokens(np.repeat(token_ids[rows], counts), counts, self.ready.vocab_size)
        chosen = np.where(asked, np.float32(LEAST), np.float32(0))
        return column(chosen), (i32_column(rows), column(counts), column(ids), column(values))

    def _score(self, slots: Int32, starts: list[int], lengths: list[int]) -> tuple[ChunkLogprobs, ...]:
        """Computes the log-probs of the prompt tokens that the chunks' tokens predict, if their prompts want them."""
        chunks = []
        for slot, start, length in zip(slots.tolist(), starts, lengths, strict=True):
            num_top = int(self._num_prompt_logprobs[slot])
            count = min(length, int(self._num_prompt[slot]) - start - 1)
            if num_top < 0 or count <= 0:
                continue
            tops = np.full(count, num_top, np.int32)
            ids, values = rank_tokens(np.repeat(np.arange(count, dtype=np.int32), num_top), tops, self.ready.vocab_size)
            chunks.append(
                ChunkLogprobs(
                    slot=slot,
                    start=start,
                    logprobs=f32_column([LEAST] * count),
                    ranks=i32_column([1] * count),
                    num_top=num_top,
                    top_ids=column(ids),
                    top_logprobs=column(values),
                )
            )
        return tuple(chunks)


def read_wants(sampling: TokenSampling) -> Want:
    """Reads the sampling parameters that a simulated row regards."""
    return (bytes(sampling.end_ids), sampling.min_tokens, sampling.num_logprobs, sampling.num_prompt_logprobs)


def draw_bits(seeds: UInt64, positions: UInt64) -> UInt64:
    """Draws 64 bits for each (seed, position): splitmix64 (Steele et al. 2014), whose state advances by a constant."""
    x = seeds + positions * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def rank_tokens(chosen: Int32, counts: Int32, vocab_size: int) -> tuple[Int32, npt.NDArray[np.float32]]:
    """Returns `counts` tokens a row and their log-probs. `chosen`, repeated so often, comes first."""
    firsts = np.cumsum(counts) - counts
    nth = (np.arange(chosen.size) - np.repeat(firsts, counts)).astype(np.int32)
    return (chosen + nth) % np.int32(vocab_size), (LEAST - nth).astype(np.float32)
