"""A rank without a model, for tests of the core: its "keys and values" are the token ids, written page by page.

Its next token is a function of everything that a row's page table shows it, so a page that is missing, stale, shared
wrongly or overwritten changes the tokens. `expected` computes the same without pages. Knows messages only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import EMPTY, Int32, as_bool, as_i32, as_i64, column, f32_column, i32_column, next_rows
from toka_async.messages import ChunkLogprobs, Prompt, Ready, Step, StepDone, Submit
from toka_async.scheduler.sequences.requests import sample_seeds


def next_token(context: Int32, seed: int, vocab: int) -> int:
    """The token after `context` for a sample's seed."""
    value = seed & 0xFFFFFFFF
    for token in context.tolist():
        value = (value * 1000003 + token + 1) & 0xFFFFFFFF
    return (value >> 7) % vocab


def expected(prompt: Int32, seed: int, sample: int, max_tokens: int, ends: set[int], vocab: int) -> list[int]:
    """The tokens of a sample, computed without pages."""
    sample_seed = int(sample_seeds(seed, np.asarray([sample], np.int32))[0])
    context: list[int] = prompt.tolist()
    for _ in range(max_tokens):
        context.append(next_token(np.asarray(context, np.int32), sample_seed, vocab))
        if context[-1] in ends:
            break
    return context[prompt.size :]


def prompt_score(tokens: Int32, index: int) -> float:
    """The log-prob of prompt token `index`."""
    return -float(tokens[: index + 1].sum() % 97) - 0.5


@dataclass(slots=True)
class Row:
    """A slot in use. opened: the weights when its prompt came. windows: the window pages of its pages, as known."""

    prompt: Prompt
    seed: int
    position: int
    last_token: int
    opened: int
    pages: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    state: list[tuple[int, int]] = field(default_factory=list)  # tokens and the weights that computed them


class PageRank:
    """Runs steps over pages of token ids.

    weights: number of those that it computes with. No row sees what older ones computed than those of its prompt.
    """

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.pages = np.full((ready.num_pages, ready.page_size), -1, np.int32)
        self.rows: dict[int, Row] = {}
        self.order: Int32 = np.empty(0, np.int32)
        self.prompts: dict[int, Prompt] = {}
        self.weights = 0
        self._weights_of = np.zeros_like(self.pages)  # with which each place was computed
        self._opened: dict[int, int] = {}  # weights when a prompt came, by key
        self.snapshots: dict[int, list[tuple[int, int]]] = {}
        self.window_pages = np.full((ready.num_window_pages, ready.page_size), -1, np.int32)
        self._beside = np.full(ready.num_pages, -1, np.int32)
        self.num_computed = 0
        self.num_grouped = 0  # rows of all steps that were in a group

    def run(self, step: Step) -> StepDone:
        self._apply(step)
        sampled: list[int] = []
        scores: list[ChunkLogprobs] = []
        work = [(int(slot), 1, True) for slot in self.order]
        lengths = zip(as_i32(step.chunk_slots), as_i32(step.chunk_lengths), as_bool(step.chunk_samples), strict=True)
        chunks = [(int(slot), int(length), bool(samples)) for slot, length, samples in lengths]
        assert not {slot for slot, _, _ in chunks} & set(self.order.tolist())
        starts = {slot: self.rows[slot].position for slot, _, _ in work + chunks}
        for slot, length, samples in work + chunks:  # in order, as parts of a step are: nothing later is seen
            row = self.rows[slot]
            tokens = np.asarray([row.last_token], np.int32)
            if (slot, length, samples) in chunks:
                tokens = as_i32(row.prompt.token_ids)[row.position : row.position + length]
                assert tokens.size == length > 0
            self._write(slot, tokens, length)
            context = self._read(row)
            assert (context >= 0).all(), "a row sees a page that was never written"
            if self.ready.window:
                first = max(0, starts[slot] - self.ready.window + 1)
                seen = self._read_windows(row, first // self.ready.page_size)
                assert (context[first:] == seen[first % self.ready.page_size :]).all(), "a row sees another's window"
            if self.ready.num_snapshots:
                self._save(step, slot, starts[slot])
                assert [token for token, _ in row.state] == context.tolist(), "a row has another's state"
                assert all(weights >= row.opened for _, weights in row.state), "a row has a state of older weights"
            weights = self._weights_of[row.pages].reshape(-1)[: row.position]
            assert (weights >= row.opened).all(), "a row sees a page of older weights"
            if samples:
                row.last_token = next_token(context, row.seed, self.ready.vocab_size)
                sampled.append(row.last_token)
            if row.prompt.sampling.num_prompt_logprobs >= 0 and (slot, length, samples) in chunks:
                scores.append(self._score(slot, starts[slot], length))
            self.num_computed += length
        top = [(i, slot) for i, (slot, _, samples) in enumerate(work + chunks) if samples]
        top_rows, top_counts, top_ids, top_logprobs = self._tops([slot for _, slot in top], sampled)
        return StepDone(
            step_id=step.step_id,
            token_ids=i32_column(sampled),
            logprobs=f32_column([-token / 7 for token in sampled]),
            top_rows=top_rows,
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompts=tuple(scores),
        )

    def _apply(self, step: Step) -> None:
        for key in as_i32(step.dropped_prompts).tolist():
            del self.prompts[key]
        sources, targets = as_i32(step.copy_sources), as_i32(step.copy_targets)
        copied = self.window_pages[self._beside[sources]] if self.ready.window else None
        changed = as_i32(step.window_pages).reshape(-1, 2)
        assert np.unique(changed[:, 0]).size == len(changed)
        self._beside[changed[:, 0]] = changed[:, 1]
        self.window_pages[changed[:, 1]] = -1  # what was there is of no use
        freed = as_i32(step.freed)
        for slot in freed.tolist():
            del self.rows[slot]
        for prompt in step.prompts:
            assert prompt.key not in self.prompts
            self.prompts[prompt.key] = prompt
            self._opened[prompt.key] = self.weights
        columns = zip(as_i32(step.admit_slots), as_i32(step.admit_keys), as_i32(step.admit_starts), strict=True)
        for (slot, key, start), seed in zip(columns, as_i64(step.admit_seeds), strict=True):
            assert int(slot) not in self.rows
            assert 0 <= slot < self.ready.max_seqs
            prompt = self.prompts[int(key)]
            token = int(as_i32(prompt.token_ids)[start])
            pages, opened = as_i32(prompt.pages).tolist(), self._opened[int(key)]
            windows = self._beside[pages].tolist()
            self.rows[int(slot)] = Row(prompt, int(seed), int(start), token, opened, pages, windows)
        if self.ready.num_snapshots:
            self._begin_states(step)
        else:
            assert not step.admit_snapshots
            assert not step.save_slots
        assert np.unique(targets).size == targets.size
        self.pages[targets] = self.pages[sources]
        if copied is not None:
            self.window_pages[self._beside[targets]] = copied
        self._weights_of[targets] = self._weights_of[sources]
        for slot, page in zip(as_i32(step.page_slots).tolist(), as_i32(step.page_ids).tolist(), strict=True):
            self.rows[slot].pages.append(page)
            self.rows[slot].windows.append(int(self._beside[page]))
        self._renew_windows(step)
        self.order = next_rows(self.order, freed, as_i32(step.joined))
        assert np.unique(self.order).size == self.order.size
        if step.order:
            assert set(as_i32(step.order).tolist()) == set(self.order.tolist())
            assert len(as_i32(step.order)) == self.order.size
            self.order = as_i32(step.order)
        self._check_groups(step)

    def _begin_states(self, step: Step) -> None:
        slots, snapshots = as_i32(step.admit_slots), as_i32(step.admit_snapshots)
        for slot, snapshot in zip(slots.tolist(), snapshots.tolist(), strict=True):
            row = self.rows[slot]
            row.state = [] if snapshot < 0 else [*self.snapshots[snapshot]]
            assert len(row.state) == row.position, "a row begins with the state of another position"
        lengths = dict(zip(as_i32(step.chunk_slots).tolist(), as_i32(step.chunk_lengths).tolist(), strict=True))
        saves = zip(as_i32(step.save_slots).tolist(), as_i32(step.save_lengths).tolist(), strict=True)
        assert all(0 < length <= lengths[slot] for slot, length in saves)
        targets = as_i32(step.save_snapshots)
        assert np.unique(targets).size == targets.size
        assert all(0 <= target < self.ready.num_snapshots for target in targets)

    def _save(self, step: Step, slot: int, start: int) -> None:
        saves = (as_i32(column).tolist() for column in (step.save_slots, step.save_lengths, step.save_snapshots))
        for each, length, snapshot in zip(*saves, strict=True):
            if each == slot:
                self.snapshots[snapshot] = self.rows[slot].state[: start + length]

    def _check_groups(self, step: Step) -> None:
        """Groups do not overlap; each of their rows has the group's pages first, and its newest token elsewhere."""
        columns = (as_i32(column).tolist() for column in (step.group_starts, step.group_rows, step.group_pages))
        end = 0
        for start, count, num_pages in zip(*columns, strict=True):
            assert start >= end
            assert count >= 2
            assert num_pages >= 1
            end = start + count
            assert end <= self.order.size
            rows = [self.rows[slot] for slot in self.order[start:end].tolist()]
            assert len({tuple(row.pages[:num_pages]) for row in rows}) == 1
            assert all(num_pages * self.ready.page_size <= row.position for row in rows)
            short = [row for row in rows if row.position < self.ready.window]
            assert all(row.windows[:num_pages] == rows[0].windows[:num_pages] for row in short)
            self.num_grouped += count

    def _write(self, slot: int, tokens: Int32, length: int) -> None:
        row = self.rows[slot]
        for token in tokens.tolist():
            page = row.pages[row.position // self.ready.page_size]
            place = row.position % self.ready.page_size
            self.pages[page, place], self._weights_of[page, place] = token, self.weights
            if self.ready.window:
                self.window_pages[row.windows[row.position // self.ready.page_size], place] = token
            row.state.append((token, self.weights))
            row.position += 1
        assert length == tokens.size

    def _read(self, row: Row) -> Int32:
        return self.pages[row.pages].reshape(-1)[: row.position]

    def _renew_windows(self, step: Step) -> None:
        """Pages that chunks compute may have other window pages than when rows were admitted, of all rows with them."""
        size = self.ready.page_size
        for slot, length in zip(as_i32(step.chunk_slots).tolist(), as_i32(step.chunk_lengths).tolist(), strict=True):
            start = self.rows[slot].position
            for place in range(start // size, -(-(start + length) // size)):
                for row in self.rows.values():
                    if place < len(row.pages):
                        row.windows[place] = int(self._beside[row.pages[place]])

    def _read_windows(self, row: Row, first: int) -> Int32:
        size = self.ready.page_size
        windows = row.windows[first : -(-row.position // size)]
        assert min(windows) >= 0
        return self.window_pages[windows].reshape(-1)[: row.position - first * size]

    def _score(self, slot: int, start: int, length: int) -> ChunkLogprobs:
        prompt = self.rows[slot].prompt
        tokens = as_i32(prompt.token_ids)[: prompt.num_prompt]
        places = [i for i in range(start + 1, start + length + 1) if i < tokens.size]
        num_top = prompt.sampling.num_prompt_logprobs
        values = np.asarray([prompt_score(tokens, i) for i in places], np.float32)
        return ChunkLogprobs(
            slot=slot,
            start=start,
            logprobs=column(values),
            ranks=column(tokens[places] + 1) if places else EMPTY,
            num_top=num_top,
            top_ids=column(np.repeat(tokens[places], num_top)) if places else EMPTY,
            top_logprobs=column(np.repeat(values, num_top)),
        )

    def _tops(self, slots: list[int], sampled: list[int]) -> tuple[memoryview, ...]:
        counts = [max(0, self.rows[slot].prompt.sampling.num_logprobs) for slot in slots]
        rows = [i for i, count in enumerate(counts) if count]
        ids = [sampled[i] + j for i in rows for j in range(counts[i])]
        per_row = i32_column([counts[i] for i in rows])
        return i32_column(rows), per_row, i32_column(ids), f32_column([-float(token) for token in ids])


def submit(request_id: int, prompt: list[int], **fields: object) -> Submit:
    """A Submit with the fields that a test does not care about filled in."""
    from toka_async.messages import TokenSampling

    values: dict[str, object] = {"max_tokens": 4, "seed": request_id, "sampling": TokenSampling()} | fields
    return Submit(request_id=request_id, prompt=i32_column(prompt), **values)  # type: ignore[arg-type]
