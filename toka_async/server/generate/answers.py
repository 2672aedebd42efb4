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

from toka_async.messages import Reason
from toka_async.openai.responses import FinishReason, PromptTokensDetails, Usage
from toka_async.server.generate.logprobs import packed_logprobs
from toka_async.server.generate.sample_text import Piece
from toka_async.server.generate.service import Output, Run

FINISH: dict[Reason, FinishReason | None] = {
    Reason.NONE: None,
    Reason.STOP: "stop",
    Reason.STOP_STRING: "stop",
    Reason.LENGTH: "length",
    Reason.ABORT: "abort",
    Reason.ERROR: "error",
}


class Answer(Protocol):
    """Builds the response of one request, or the chunks of a streamed one."""

    def whole(self, run: Run, outputs: Sequence[Sequence[Output]]) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """The response; `outputs` by prompt, by sample."""
        ...

    def first(self, run: Run, prompt: int, sample: int) -> msgspec.Struct | None:
        """The chunk that comes before a sample's text, where there is one."""
        ...

    def chunk(
        self, run: Run, prompt: int, sample: int, piece: Piece, reason: Reason, stop: str | int | None
    ) -> msgspec.Struct:
        """New text of a sample."""
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


def new_header(prefix: str, model: str) -> AnswerHeader:
    """With an id of its own, e.g. `cmpl-…`."""
    return AnswerHeader(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model)


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


def num_kept(outputs: Sequence[Sequence[Output]]) -> int:
    return sum(len(output.rows) for samples in outputs for output in samples)


def is_heavy(run: Run, outputs: Sequence[Sequence[Output]]) -> bool:
    """Whether to build the response in a thread: it takes milliseconds."""
    sampling = run.generation.sampling
    wants_logprobs = sampling.num_logprobs >= 0 or sampling.num_prompt_logprobs >= 0
    wants_each_token = wants_logprobs or run.generation.return_token_ids
    num_entries = num_kept(outputs) + sum(map(len, run.prompts)) if wants_each_token else sum(map(len, outputs))
    return num_entries > 256
