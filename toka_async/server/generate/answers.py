"""What the answers of completions and chat have in common: ids, usage, reasons; and the shape that each gives them.

Knows the OpenAI shapes and running requests; knows no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from toka_async.arrays import as_i32
from toka_async.messages import Reason
from toka_async.openai.generation import GenerationParams
from toka_async.openai.responses import (
    FinishReason,
    PackedPrompt,
    PackedTokens,
    PromptTokensDetails,
    Usage,
    WeightSpan,
)
from toka_async.server.engine.token_block import Score, TokenRows
from toka_async.server.engine.weight_versions import list_spans
from toka_async.server.generate.logprobs import pack_prompt, pack_tokens, packed_logprobs, prompt_rows
from toka_async.server.generate.sample_text import Piece
from toka_async.server.generate.service import Output, Run, Service

FINISH: dict[Reason, FinishReason | None] = {
    Reason.NONE: None,
    Reason.STOP: "stop",
    Reason.STOP_STRING: "stop",
    Reason.LENGTH: "length",
    Reason.ABORT: "abort",
    Reason.ERROR: "error",
}


class WholeAnswer(Protocol):
    """Builds the response of one request."""

    def whole(self, run: Run, outputs: Sequence[Sequence[Output]]) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """The response; `outputs` by prompt, by sample."""
        ...


class Answer(WholeAnswer, Protocol):
    """Also builds the chunks of a streamed response."""

    def first(self, run: Run, prompt: int, sample: int) -> msgspec.Struct | None:
        """The chunk that comes before a sample's text, where there is one."""
        ...

    def chunks(
        self, run: Run, prompt: int, sample: int, piece: Piece, reason: Reason, stop: str | int | None
    ) -> Sequence[msgspec.Struct]:
        """New text of a sample; no chunk while nothing can be said of it."""
        ...

    def chunk_logprobs(
        self, run: Run, prompt: int, token_ids: list[int], scores: list[Score], offsets: list[int]
    ) -> msgspec.Struct | None:
        """What a chunk says of new tokens beside their text, where that is their log-probs alone; otherwise None.

        offsets: where each token begins in the text of the sample.
        """
        ...

    def with_prompt(self, chunk: Any, run: Run, prompt: int) -> msgspec.Struct:
        """A sample's first chunk, one of its own making, with the prompt's token ids."""
        ...

    def last(self, usage: Usage) -> msgspec.Struct:
        """The chunk with the usage."""
        ...


class AnswerHeader(msgspec.Struct, frozen=True):
    """The fields at the start of each response and chunk."""

    id: str
    created: int
    model: str


def new_header(prefix: str, model: str, request_id: str = "") -> AnswerHeader:
    """With the client's id after the prefix, e.g. `cmpl-…`, or one of its own."""
    return AnswerHeader(f"{prefix}-{request_id or secrets.token_hex(16)}", int(time.time()), model)


def run_usage(run: Run, completion_tokens: int) -> Usage:
    """Prompts count once each, however many samples they have."""
    prompt_tokens = sum(len(prompt) for prompt in run.prompts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(int(run.group.num_cached.sum())),
    )


def sample_usage(run: Run, prompt: int, completion_tokens: int) -> Usage:
    """Of one sample so far, as chunks of a stream say it."""
    prompt_tokens, cached = len(run.prompts[prompt]), int(run.group.num_cached[prompt])
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


def fingerprint(run: Run, outputs: Sequence[Sequence[Output]]) -> str | UnsetType:
    """`system_fingerprint`: only where log-probs are wanted in it."""
    generation = run.generation
    if not generation.pack_logprobs:
        return UNSET
    rows = [output.rows for samples in outputs for output in samples]
    return packed_logprobs(rows, generation.sampling.num_logprobs)


def wants_json_logprobs(generation: GenerationParams) -> bool:
    """Whether samples have `logprobs`, rather than arrays or nothing."""
    return generation.sampling.num_logprobs >= 0 and not (generation.pack_logprobs or generation.pack_columns)


def weight_versions(service: Service, run: Run, rows: TokenRows, first: int = 0) -> list[WeightSpan] | UnsetType:
    """`weight_versions` of tokens, of which there are `first` before them in the sample; only where it is asked for."""
    if not run.generation.return_weight_versions:
        return UNSET
    names = service.engine.requests.versions.names
    return [WeightSpan(names[number], first + start, first + end) for start, end, number in list_spans(rows.versions)]


def packed_tokens(run: Run, rows: TokenRows) -> PackedTokens | UnsetType:
    """`packed_logprobs` of tokens; only where it is asked for."""
    num_top = run.generation.sampling.num_logprobs
    return pack_tokens(rows, num_top) if run.generation.pack_columns and num_top >= 0 else UNSET


def packed_prompt(run: Run, prompt: int) -> PackedPrompt | UnsetType | None:
    """`packed_prompt_logprobs`, only where it is asked for; None if the prompt was not computed."""
    generation, width = run.generation, run.generation.sampling.num_prompt_logprobs
    if not generation.pack_columns or width < 0:
        return UNSET
    prefilled = run.prefilled(prompt)
    if prefilled is None:
        return None
    num_top = generation.num_prompt_logprobs if generation.num_prompt_logprobs >= 0 else width
    return pack_prompt(prompt_rows(run.prompts[prompt], prefilled, width), as_i32(prefilled.ranks), num_top)


def num_kept(outputs: Sequence[Sequence[Output]]) -> int:
    return sum(len(output.rows) for samples in outputs for output in samples)


def wants_tokens(generation: GenerationParams) -> bool:
    """Whether chunks say something of each token beside its text."""
    wants_numbers = generation.sampling.num_logprobs >= 0
    return generation.return_token_ids or wants_numbers or generation.return_weight_versions


def is_heavy(run: Run, outputs: Sequence[Sequence[Output]]) -> bool:
    """Whether to build the response in a thread: it takes milliseconds."""
    sampling = run.generation.sampling
    wants_logprobs = sampling.num_logprobs >= 0 or sampling.num_prompt_logprobs >= 0
    wants_each_token = wants_logprobs or run.generation.return_token_ids
    num_entries = num_kept(outputs) + sum(map(len, run.prompts)) if wants_each_token else sum(map(len, outputs))
    return num_entries > 256
