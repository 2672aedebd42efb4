"""What POST /generate answers of its samples, whole or in a stream, where each event says everything so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from toka_async.messages import Reason
from toka_async.openai.responses import Usage, WeightSpan
from toka_async.server.engine.token_block import Score, TokenRows, concat_rows
from toka_async.server.engine.weight_versions import list_spans
from toka_async.server.generate.events import ENCODER
from toka_async.server.generate.logprobs import likeliest, numbers, prompt_rows
from toka_async.server.generate.sample_text import Piece
from toka_async.server.generate.service import Output, Run, Service
from toka_async.server.sglang.prompts import Wish
from toka_async.server.sglang.responses import LoggedToken, LoggedTokens, SglangFinish, SglangMeta, SglangSample

Logs = Raw | UnsetType


@dataclass(slots=True)
class SglangAnswer:
    """The responses of one request to the engine.

    began: when the request came. wish: what is wanted of each prompt. names: the prompts' ids. is_one: the answer is
    one sample, not a list. has_texts: log-probs have the texts of tokens. has_prompts: each sample has its prompt's
    token ids. so_far: of a stream, by row, the text and the tokens that have come.
    """

    service: Service
    began: float
    wish: Wish
    names: list[str]
    is_one: bool
    has_texts: bool
    has_prompts: bool
    so_far: dict[int, tuple[str, TokenRows]] = field(default_factory=dict)

    def whole(self, run: Run, outputs: Sequence[Sequence[Output]]) -> SglangSample | list[SglangSample]:
        samples = list(chain.from_iterable(self.by_prompt(run, outputs)))
        return samples[0] if self.is_one else samples

    def by_prompt(self, run: Run, outputs: Sequence[Sequence[Output]]) -> list[list[SglangSample]]:
        """The samples of each prompt."""
        made = []
        for prompt, samples in enumerate(outputs):
            of_prompt = self.prompt_logs(run, prompt)
            made.append(
                [
                    self.sample(run, prompt, sample, output.text, output.rows, output.reason, output.stop, of_prompt)
                    for sample, output in enumerate(samples)
                ]
            )
        return made

    def first(self, run: Run, prompt: int, sample: int) -> None:
        del run, prompt, sample  # no event comes before a sample's tokens

    def chunk_logprobs(
        self, run: Run, prompt: int, token_ids: list[int], scores: list[Score], offsets: list[int]
    ) -> None:
        del run, prompt, token_ids, scores, offsets  # chunks say more of each token

    def chunks(
        self, run: Run, prompt: int, sample: int, piece: Piece, reason: Reason, stop: str | int | None
    ) -> list[SglangSample]:
        row = prompt * run.generation.n + sample
        text, rows = self.so_far.get(row, ("", None))
        text, rows = text + piece.text, piece.rows if rows is None else concat_rows([rows, piece.rows])
        self.so_far[row] = text, rows
        made = self.sample(run, prompt, sample, text, rows, reason, stop, self.prompt_logs(run, prompt))
        return [made if self.is_one else replace(made, index=row)]

    def with_prompt(self, chunk: SglangSample, run: Run, prompt: int) -> SglangSample:
        del run, prompt  # each chunk has them
        return chunk

    def last(self, usage: Usage) -> SglangSample:
        raise AssertionError(f"no request of this kind asks for its usage: {usage}")

    def sample(
        self,
        run: Run,
        prompt: int,
        sample: int,
        text: str,
        rows: TokenRows,
        reason: Reason,
        stop: str | int | None,
        of_prompt: tuple[Logs, Logs],
    ) -> SglangSample:
        finish = None if reason is Reason.NONE else finish_of(rows, reason, stop)
        wants_logs, num_top, ids = self.wish.logprobs, self.wish.num_top, run.prompts[prompt]
        name, engine = self.names[prompt], self.service.engine
        names, control = engine.requests.versions.names, engine.control
        meta = SglangMeta(
            id=name if run.generation.n == 1 else f"{name}_{sample}",
            finish_reason=finish,
            prompt_tokens=len(ids),
            completion_tokens=len(rows),
            cached_tokens=int(run.group.num_cached[prompt]),
            weight_version=names[int(rows.versions[-1])] if rows.versions.size else control.weight_version,
            weight_versions=[WeightSpan(names[number], start, end) for start, end, number in list_spans(rows.versions)],
            e2e_latency=UNSET if finish is None else monotonic() - self.began,
            input_token_logprobs=of_prompt[0],
            output_token_logprobs=encode(self.chosen(rows)) if wants_logs else UNSET,
            output_token_logprobs_length=len(rows) if wants_logs else UNSET,
            input_top_logprobs=of_prompt[1],
            output_top_logprobs=encode(self.likeliest(rows)) if num_top else UNSET,
        )
        prompt_ids = ids.tolist() if self.has_prompts else UNSET
        return SglangSample(text=text, output_ids=rows.token_ids.tolist(), meta_info=meta, prompt_token_ids=prompt_ids)

    def prompt_logs(self, run: Run, prompt: int) -> tuple[Logs, Logs]:
        """The prompt's log-probs from where they are wanted, and the likeliest tokens there; as JSON, since all samples
        have the same. The first token has none, wherever it is.
        """
        if not self.wish.logprobs:
            return UNSET, UNSET
        start, num_top, ids = self.wish.start, self.wish.num_top, run.prompts[prompt]
        prefilled = run.prefilled(prompt)
        if prefilled is None or not 0 <= start < len(ids):  # none are wanted, or the prompt was not computed
            return Raw(b"[]"), Raw(b"[]") if num_top else UNSET
        rows = prompt_rows(ids, prefilled, num_top).part(start, len(ids) - 1)
        first: LoggedTokens = [(None, int(ids[start]), self.text_of(int(ids[start])))]
        chosen = encode([*first, *self.chosen(rows)])
        return chosen, encode([None, *self.likeliest(rows)]) if num_top else UNSET

    def chosen(self, rows: TokenRows) -> LoggedTokens:
        return list(map(self.logged, numbers(rows.logprobs), rows.token_ids.tolist()))

    def likeliest(self, rows: TokenRows) -> list[LoggedTokens]:
        num_top = self.wish.num_top
        return [[self.logged(value, token_id) for token_id, value in tops] for tops in likeliest(rows, num_top)]

    def logged(self, logprob: float, token_id: int) -> LoggedToken:
        return logprob, token_id, self.text_of(token_id)

    def text_of(self, token_id: int) -> str | None:
        return self.service.tokenizer.token_text(token_id) if self.has_texts else None


def encode(value: object) -> Raw:
    """As JSON at once: what the JSON of all samples is made of would take several times its memory."""
    return Raw(ENCODER.encode(value))


def finish_of(rows: TokenRows, reason: Reason, stop: str | int | None) -> SglangFinish:
    """Why a sample has ended; every end token is named, the model's own too."""
    if reason is Reason.ABORT:  # clients look for the first words to tell that there is nothing
        return SglangFinish(type="abort", message="Abort in decoding" if len(rows) else "Abort before prefill")
    if reason is Reason.ERROR:
        return SglangFinish(type="abort", message="The grammar failed")
    if reason is Reason.LENGTH:
        return SglangFinish(type="length", length=len(rows))
    last = int(rows.token_ids[-1]) if len(rows) else UNSET
    return SglangFinish(type="stop", matched=last if stop is None else stop)
