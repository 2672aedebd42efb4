"""Lines of a batch as requests to the engine, behind all that comes from connections.

Knows the API's requests and the engine's errors; knows nothing of files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from toka_async.batches.lines import Line, read_custom_id
from toka_async.batches.records import BatchRecord
from toka_async.batches.results import Answered
from toka_async.batches.work import LineRequest, TryLaterError
from toka_async.openai.errors import bad_request
from toka_async.openai.parse import LARGE, parse_request
from toka_async.openai.requests import ChatRequest, CompletionRequest
from toka_async.server.access.errors import as_api_error
from toka_async.server.engine.inflight import EngineStoppedError
from toka_async.server.generate.answers import Answer
from toka_async.server.generate.chat import chat_run
from toka_async.server.generate.completions import completion_run
from toka_async.server.generate.service import Run, Service
from toka_async.server.generate.whole_body import whole_body
from toka_async.server.limits.account import Account
from toka_async.server.limits.jobs import NotServingError, OverloadedError

logger = logging.getLogger(__name__)

PRIORITY = 1 << 32  # behind the last that a request can ask for; a line's own priority counts among lines
KINDS: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}

_LINE = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class LineAnswers:
    """Gives lines to the engine. account_of: what the lines of a batch of that owner count in."""

    service: Service
    account_of: Callable[[str], Account]

    async def question(self, record: BatchRecord, raw: bytes) -> LineRequest | Answered:
        """See `Answers`."""
        account, endpoint = self.account_of(record.owner), record.endpoint
        await self.service.accounts.turns.gone(account)
        custom_id = read_custom_id(raw)
        try:
            if len(raw) < LARGE:
                wire = parse_line(endpoint, raw)
            else:
                loop = asyncio.get_running_loop()
                wire = await loop.run_in_executor(self.service.executor, parse_line, endpoint, raw)
            return LineQuestion(self.service, account, custom_id, wire)
        except Exception as error:
            return failed(custom_id, error)


def parse_line(endpoint: str, raw: bytes) -> CompletionRequest | ChatRequest:
    """What a line asks. Raises ApiError (400)."""
    try:
        line = _LINE.decode(raw)
    except msgspec.ValidationError as error:
        raise bad_request(f"the line is not a request: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the line is not valid JSON: {error}") from None
    if line.method != "POST":
        raise bad_request(f"'method' must be POST, got {line.method[:64]!r}", param="method")
    if line.url not in ([endpoint] if endpoint else KINDS):
        wanted = endpoint or " or ".join(KINDS)
        raise bad_request(f"'url' must be {wanted}, got {line.url[:64]!r}", param="url")
    wire = parse_request(bytes(line.body), KINDS[line.url])
    if wire.stream:
        raise bad_request("'stream' must be false in a batch", param="stream")
    return msgspec.structs.replace(wire, priority=PRIORITY + wire.priority)


@dataclass(frozen=True, slots=True)
class LineQuestion:
    """A line that can be asked."""

    service: Service
    account: Account
    custom_id: str
    wire: CompletionRequest | ChatRequest

    @property
    def cost(self) -> int:
        """Samples."""
        return self.wire.n * num_prompts(self.wire)

    async def answer(self) -> Answered:
        """See `LineRequest`."""
        try:
            async with self._start() as (run, answer):
                body, usage = await whole_body(self.service, run, answer)
        except (NotServingError, OverloadedError, EngineStoppedError) as error:
            raise TryLaterError(str(error), stopped=isinstance(error, EngineStoppedError)) from None
        except Exception as error:
            return failed(self.custom_id, error)
        cached = usage.prompt_tokens_details.cached_tokens
        return Answered(self.custom_id, 200, body, None, usage.prompt_tokens, cached, usage.completion_tokens)

    def _start(self) -> AbstractAsyncContextManager[tuple[Run, Answer]]:
        if isinstance(self.wire, ChatRequest):
            return chat_run(self.service, self.wire, self.account)
        return completion_run(self.service, self.wire, self.account)


def num_prompts(wire: CompletionRequest | ChatRequest) -> int:
    prompt: str | list[Any] = wire.prompt if isinstance(wire, CompletionRequest) else ""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def failed(custom_id: str, error: Exception) -> Answered:
    """Whatever a line raises is its own answer, and no other line's affair."""
    known = as_api_error(error)
    if known.code == "internal_error":
        logger.error("a line of a batch failed", exc_info=error)
    return Answered(custom_id, known.status, msgspec.json.encode(known.response()))
