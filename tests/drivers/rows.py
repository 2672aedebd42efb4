"""A scheduler in miniature, which makes steps of random events and knows what each row must sample.

Its rows are lists of tokens: nothing of it is vectorised, paged or kept on a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from tests.drivers.stage_runners import StageRunners, setups
from tests.fakes.model import FakeAttention, FakeCache, FakeModel, FakeStage, logits_of
from toka_async.arrays import as_f32, as_i32, column, i32_column
from toka_async.attention.build import BuiltAttention
from toka_async.messages import Prompt, Ready, Step, StepDone, TokenSampling
from toka_async.model.comm import Comm
from toka_async.model.rng import draw_uniforms
from toka_async.model.sampling import make_params, sample
from toka_async.runner.pipeline import StageSetup
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.runner.samples import RowShares

VOCAB = 24


@dataclass(slots=True)
class Request:
    prompt: list[int]
    sampling: TokenSampling


@dataclass(slots=True)
class Row:
    """A running sequence. computed: tokens whose cache entries are written. fed: leading tokens fed from `prompt`."""

    request: Request
    seed: int
    key: int
    slot: int
    tokens: list[int]
    fed: int
    computed: int
    pages: list[int]
    own_pages: bool = False
    decoding: bool = False
    refs: list[int] = field(default_factory=list)


def next_token(row_tokens: Sequence[int], request: Request, seed: int) -> int:
    """What a sequence with these tokens samples next, one row at a time and in plain Python where it can be."""
    logits = logits_of(row_tokens, VOCAB)
    s, num_prompt = request.sampling, len(request.prompt)
    generated = list(row_tokens[num_prompt:])
    if s.allowed_ids:
        allowed = as_i32(s.allowed_ids).tolist()
        logits[0, [token for token in range(VOCAB) if token not in allowed]] = -torch.inf
    for token, bias in zip(as_i32(s.bias_ids).tolist(), as_f32(s.bias_values).tolist(), strict=True):
        if token < VOCAB:
            logits[0, token] += bias
    if len(generated) < s.min_tokens:
        logits[0, [token for token in as_i32(s.end_ids).tolist() if token < VOCAB]] = -torch.inf
    for token in set(row_tokens):
        value = logits[0, token]
        logits[0, token] = value * s.repetition_penalty if value < 0 else value / s.repetition_penalty
    for token in set(generated):
        logits[0, token] -= s.presence_penalty
        logits[0, token] -= s.frequency_penalty * generated.count(token)
    uniform = draw_uniforms(np.array([seed]), np.array([len(generated)]))
    return int(sample(logits, make_params(s), uniform)[0])


class Driver:
    """Builds steps, runs them, compares what comes back.

    use_kernels: the runner samples by kernels, and its steps of decoding rows can be captured. comm: of ranks that
    share the rows which they sample. num_stages: of a pipeline, with a runner each, of which `runner` is the last.
    """

    def __init__(
        self,
        page_size: int,
        max_seqs: int = 8,
        num_pages: int = 200,
        *,
        use_kernels: bool = False,
        comm: Comm | None = None,
        num_stages: int = 1,
        num_parts: int = 1,
    ) -> None:
        self.page_size = page_size
        self.free_pages = list(range(num_pages))[::-1]
        self.free_slots = list(range(max_seqs))[::-1]
        self.owners: dict[int, int] = defaultdict(int)  # page -> rows that use it
        self.rows: list[Row] = []
        self.order: list[Row] = []
        self.keys = 0
        self.step_id = 0
        ready = Ready(num_pages=num_pages, page_size=page_size, max_seqs=max_seqs, max_context=10_000, vocab_size=VOCAB)

        def runner(setup: StageSetup | None) -> Runner:
            cache, attention = FakeCache(num_pages + 1, page_size), FakeAttention()
            shares = None
            if setup is None:
                model = FakeModel(VOCAB, cache)
                if comm is not None:
                    rank, size = comm.rank, comm.size
                    shares = RowShares(comm, lambda hidden: model.logits(hidden.chunk(size)[rank]), max_seqs)
            else:
                model = FakeStage(VOCAB, cache, setup.is_first, setup.is_last)
            built, sampling = BuiltAttention(attention, attention, mixed=attention), SamplingSetup(use_kernels, shares)
            return Runner(ready, torch.device("cpu"), model, cache, built, sampling, setup)

        of_stages = setups(num_stages, num_parts, 1, torch.float64, capacity=num_parts + 1)
        self.stages = [runner(setup) for setup in of_stages] if num_stages > 1 else [runner(None)]
        self.runner = self.stages[-1]
        self.rank = StageRunners(self.stages)
        self._reset()

    def _reset(self) -> None:
        self.dropped: list[int] = []
        self.freed: list[int] = []
        self.prompts: list[Prompt] = []
        self.admitted: list[tuple[Row, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.appended: list[tuple[int, int]] = []
        self.joined: list[Row] = []

    # ---- events of the next step ----

    def start(self, request: Request, seed: int, tokens: Sequence[int] = (), own_pages: bool = False) -> Row | None:
        """A new sequence, or one that goes on after `tokens`; None when there is no slot.

        With own_pages all pages come with the chunks, several at once.
        """
        if not self.free_slots:
            return None
        ids = [*(tokens or request.prompt)]
        key = self._key()
        shared = [] if own_pages else [self._page() for _ in range(len(ids) // self.page_size)]
        self.prompts.append(
            Prompt(
                key=key,
                token_ids=i32_column(ids),
                num_prompt=len(request.prompt),
                pages=i32_column(shared),
                sampling=request.sampling,
            )
        )
        row = Row(request, seed, key, self.free_slots.pop(), ids, len(ids), 0, shared, own_pages)
        self._admit(row, 0)
        return row

    def fork(self, leader: Row, seed: int) -> Row | None:
        """Another sample of a leader whose prompt is computed; it decodes from the next step on."""
        if not self.free_slots or not leader.decoding or leader.own_pages or leader.key in self.dropped:
            return None
        if any(leader is admitted for admitted, _ in self.admitted):
            return None  # a fork whose own copy is of this step
        num_prompt = leader.fed
        shared = leader.pages[: num_prompt // self.page_size]
        row = Row(
            leader.request, seed, leader.key, self.free_slots.pop(), leader.tokens[:num_prompt], num_prompt,
            num_prompt - 1, [*shared],
        )  # fmt: skip
        self._admit(row, num_prompt - 1)
        if num_prompt % self.page_size:
            page = self._append(row)
            self.copies.append((leader.pages[len(shared)], page))
        row.decoding = True
        self.joined.append(row)
        return row

    def free(self, row: Row) -> list[int]:
        """The row leaves; its tokens so far."""
        if any(row is admitted for admitted, _ in self.admitted):
            return []
        self.rows.remove(row)
        if row in self.order:
            self.order.remove(row)
        if row in self.joined:
            self.joined.remove(row)
        self.freed.append(row.slot)
        self.free_slots.append(row.slot)
        self._release(row)
        if not any(other.key == row.key for other in self.rows):
            self.dropped.append(row.key)
        return row.tokens

    def _admit(self, row: Row, start: int) -> None:
        self.admitted.append((row, start))
        self.rows.append(row)
        row.refs = [*row.pages]
        for page in row.pages:
            self.owners[page] += 1

    def _append(self, row: Row) -> int:
        page = self._page()
        self.owners[page] += 1
        row.pages.append(page)
        row.refs.append(page)
        self.appended.append((row.slot, page))
        return page

    def _release(self, row: Row) -> None:
        for page in row.refs:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free_pages.append(page)

    def _page(self) -> int:
        return self.free_pages.pop()

    def _key(self) -> int:
        self.keys += 1
        return self.keys

    # ---- the step ----

    def step(self, chunk_lengths: Sequence[int] = (), reverse: bool = False) -> StepDone:
        """Runs the events, a chunk of each prompt not yet computed, and a token of each decoding row."""
        self.order += self.joined
        if reverse:
            self.order.reverse()
        chunks = [(row, min(length, row.fed - row.computed)) for row, length in self._chunk_rows(chunk_lengths)]
        decoding = [*self.order]
        for row, length in [*((row, 1) for row in decoding), *chunks]:
            while len(row.pages) * self.page_size < row.computed + length:
                self._append(row)
            row.computed += length
        done = self.rank.run(self._message(chunks, reverse))
        self._reset()
        sampling = [*decoding, *(row for row, _ in chunks if row.computed == row.fed)]
        self._check(sampling, as_i32(done.token_ids).tolist())
        for row, _ in chunks:
            if row.computed == row.fed:
                row.decoding = True
                self.joined.append(row)
        return done

    def _chunk_rows(self, lengths: Sequence[int]) -> list[tuple[Row, int]]:
        waiting = [row for row in self.rows if not row.decoding]
        return list(zip(waiting, lengths, strict=False))

    def _check(self, rows: list[Row], token_ids: list[int]) -> None:
        assert token_ids == [next_token(row.tokens, row.request, row.seed) for row in rows]
        for row, token in zip(rows, token_ids, strict=True):
            row.tokens = [*row.tokens, token]

    def _message(self, chunks: list[tuple[Row, int]], reverse: bool) -> Step:
        self.step_id += 1
        step = Step(
            step_id=self.step_id,
            dropped_prompts=i32_column(self.dropped),
            freed=i32_column(self.freed),
            prompts=tuple(self.prompts),
            admit_slots=i32_column(row.slot for row, _ in self.admitted),
            admit_keys=i32_column(row.key for row, _ in self.admitted),
            admit_starts=i32_column(start for _, start in self.admitted),
            admit_seeds=column(np.array([row.seed for row, _ in self.admitted], dtype=np.int64)),
            copy_sources=i32_column(source for source, _ in self.copies),
            copy_targets=i32_column(target for _, target in self.copies),
            page_slots=i32_column(slot for slot, _ in self.appended),
            page_ids=i32_column(page for _, page in self.appended),
            joined=i32_column(row.slot for row in self.joined),
            order=i32_column(row.slot for row in self.order) if reverse else i32_column([]),
            chunk_slots=i32_column(row.slot for row, _ in chunks),
            chunk_lengths=i32_column(length for _, length in chunks),
            chunk_samples=column(np.array([row.computed == row.fed for row, _ in chunks], dtype=np.bool_)),
        )
        return msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step)
