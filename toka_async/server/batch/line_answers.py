"""Turns lines of a batch into requests to the engine, behind all that comes from connections.

Knows the API's requests and the engine's errors; knows nothing of files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from toka_async.batches.lines import Line, read_custom_id
from toka_async.batches.records import BatchRecord
from toka_async.batches.results import Answered, LineError
from toka_async.batches.work import LineRequest
from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.parse import LARGE, bound_parsed_bytes, count_parsed_bytes, parse_request
from toka_async.openai.requests import ChatRequest, CompletionRequest
from toka_async.server.access.errors import as_api_error
from toka_async.server.engine.request_group import EngineStoppedError
from toka_async.server.generate.answers import WholeAnswer
from toka_async.server.generate.chat import prepare_chat
from toka_async.server.generate.completions import prepare_completion
from toka_async.server.generate.service import PreparedRequest, Service
from toka_async.server.generate.whole_body import whole_body
from toka_async.server.limits.account import Account, Cost
from toka_async.server.limits.bodies import Bodies
from toka_async.server.limits.jobs import NotServingError, OverloadedError
from toka_async.server.responses.answer import prepare_response
from toka_async.server.responses.requests import ResponsesRequest

logger = logging.getLogger(__name__)

LineBody = CompletionRequest | ChatRequest | ResponsesRequest

PRIORITY = 1 << 32  # behind the last that a request can ask for; a line's own priority counts among lines
MAX_TRIES = 3  # of a line with which the engine stopped
NOTHING = Cost(0, 0)
KINDS: dict[str, type[LineBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
}

_LINE = msgspec.json.Decoder(Line)


class LineAnswers:
    """Gives lines to the engine.

    Args:
        account_of: finds the account that the lines of an owner's batches count in.
    """

    def __init__(self, service: Service, account_of: Callable[[str], Account]) -> None:
        self._service = service
        self._account_of = account_of
        self._most_parsed = bound_parsed_bytes(service.config.max_body_mb << 20)
        self._parsed = Bodies(2 * self._most_parsed, self._most_parsed)  # memory of large lines, as of large requests

    async def prepare(self, record: BatchRecord, raw: bytes) -> LineRequest | Answered:
        """See `Answers`. A large line waits for memory."""
        account = self._account_of(record.owner)
        if len(raw) < LARGE:
            return await self._prepare(account, *parse_line(record.endpoint, raw))
        num_bytes = await self._service.in_thread(count_parsed_bytes, raw, is_long=True)
        room = await self._parsed.reserve(record.owner, min(num_bytes, self._most_parsed), 0.0)
        try:
            parsed = await self._service.in_thread(partial(parse_line, record.endpoint), raw, is_long=True)
            return await self._prepare(account, *parsed)
        finally:
            room.shrink(0)

    async def _prepare(self, account: Account, custom_id: str, wire: LineBody | Exception) -> LineRequest | Answered:
        """Waits for admission if the engine is not ready yet."""
        service, accounts = self._service, self._service.accounts
        while not isinstance(wire, Exception):
            try:
                return PreparedLine(service, account, custom_id, *await prepare_line(service, wire))
            except NotServingError:
                accounts.window.close()
                await accounts.enter(account, NOTHING)
                account.give_back(NOTHING)
            except Exception as error:
                return answer_error(custom_id, error)
        return answer_error(custom_id, wire)


async def prepare_line(service: Service, wire: LineBody) -> tuple[PreparedRequest, WholeAnswer]:
    """Raises as `prepare_chat` does."""
    match wire:
        case ChatRequest():
            return await prepare_chat(service, wire)
        case ResponsesRequest():
            return await prepare_response(service, wire)
    return await prepare_completion(service, wire)


def parse_line(endpoint: str, raw: bytes) -> tuple[str, LineBody | Exception]:
    """Reads a line: its custom_id, and its request or why there is none. Raises StorageError as `read_custom_id` does.

    Decodes the line once. The body follows by itself, as its items are counted before objects are made of them.
    """
    try:
        line = _LINE.decode(raw)
    except msgspec.ValidationError as error:
        return read_custom_id(raw), bad_request(f"the line is not a request: {error}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return read_custom_id(raw), bad_request(f"the line is not valid JSON: {error}")
    try:
        return line.custom_id, parse_body(endpoint, line)
    except Exception as error:
        return line.custom_id, error


def parse_body(endpoint: str, line: Line) -> LineBody:
    """Reads the request of a line. Raises ApiError (400)."""
    if line.method != "POST":
        raise bad_request(f"'method' must be POST, got {line.method[:64]!r}", param="method")
    if line.url not in ([endpoint] if endpoint else KINDS):
        wanted = endpoint or " or ".join(KINDS)
        raise bad_request(f"'url' must be {wanted}, got {line.url[:64]!r}", param="url")
    wire = parse_request(bytes(line.body), KINDS[line.url])
    if wire.stream:
        raise bad_request("'stream' must be false in a batch", param="stream")
    return msgspec.structs.replace(wire, priority=PRIORITY + wire.priority)


@dataclass(slots=True)
class PreparedLine:
    """A line that can be asked. response: makes its answer. _refusal: why it can never enter."""

    service: Service
    account: Account
    custom_id: str
    request: PreparedRequest
    response: WholeAnswer
    _is_in: bool = False
    _refusal: ApiError | None = None

    async def enter(self) -> None:
        """See `LineRequest`. A line that its account can never admit does not enter; `answer` says why."""
        try:
            await self.service.accounts.enter(self.account, self.request.cost)
            self._is_in = True
        except ApiError as error:
            self._refusal = error

    def leave(self) -> None:
        """See `LineRequest`."""
        if self._is_in:
            self._is_in = False
            self.account.give_back(self.request.cost)

    async def answer(self) -> Answered:
        """See `LineRequest`."""
        num_stops = 0
        while self._refusal is None:
            try:
                async with self.service.submitted(self.request, self.account) as run:
                    body, usage = await whole_body(self.service, run, self.response)
                cached = usage.prompt_tokens_details.cached_tokens
                return Answered(self.custom_id, 200, body, None, usage.prompt_tokens, cached, usage.completion_tokens)
            except EngineStoppedError as error:
                num_stops += 1
                if num_stops == MAX_TRIES:
                    return Answered(self.custom_id, error=LineError("engine_stopped", str(error)))
            except (NotServingError, OverloadedError):
                self.service.accounts.window.close()
            except Exception as error:
                return answer_error(self.custom_id, error)
            self.leave()
            await self.enter()
        return answer_error(self.custom_id, self._refusal)


def answer_error(custom_id: str, error: Exception) -> Answered:
    """Makes the answer of a line that has raised an error: other lines go on."""
    known = as_api_error(error)
    if known.code == "internal_error":
        logger.error("a line of a batch failed", exc_info=error)
    return Answered(custom_id, known.status, msgspec.json.encode(known.response()))
