"""One client of direct submission: takes its requests, and turns what comes back of them into messages.

Many rows at once where token ids are all that is wanted; a task for each request where text is. Knows no sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

import numpy as np
from msgspec.structs import replace

from toka_async.arrays import Bool, Int32, Int64
from toka_async.logs import request_id
from toka_async.messages import Prefilled
from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.generation import RequestLimits
from toka_async.protocol import (
    Cancellation,
    Columns,
    Error,
    PromptLogprobs,
    ProtocolError,
    Results,
    ServerHeader,
    Submission,
    seal,
)
from toka_async.server.access.errors import as_api_error
from toka_async.server.engine.request_columns import RequestColumns, concat_arrays
from toka_async.server.engine.token_block import Score, TokenBlock
from toka_async.server.generate.service import Service
from toka_async.server.limits.account import Account
from toka_async.server.limits.jobs import NotServingError, OverloadedError
from toka_async.server.zmq.delivery import Delivery, Outgoing
from toka_async.server.zmq.direct_requests import run_request
from toka_async.server.zmq.fields_cache import FieldsCache, RequestFields
from toka_async.server.zmq.result_columns import block_columns, chosen
from toka_async.server.zmq.submissions import Submitted, TextBudget, as_tokens, faults, submitted

logger = logging.getLogger(__name__)

CANCELLED = ApiError(499, "cancelled by its client", code="cancelled")
ORDER: dict[type[ServerHeader], int] = {PromptLogprobs: 0, Results: 1, Error: 2}  # of what is said of one request


@dataclass(frozen=True, slots=True)
class MessagePiece:
    """A piece of a message; those with equal headers make one message. See `Outgoing`."""

    header: ServerHeader
    columns: Columns
    ids: Int64
    ended: list[int]
    remember: bool = True

    @property
    def num_bytes(self) -> int:
        """Of memory, about."""
        return 256 + sum(128 + column.nbytes for column in self.columns.values())


class Session:
    """The requests and the account of a client.

    Args:
        number: nobody else's.
        name: the client's, a secret between it and the server.
        account: what its requests count in.
        wake: called when there is something to send, or to be closed.
        most_bytes: of results that the client has not acknowledged.
        texts: what all sessions may have tokenized at once.

    Attributes:
        account: see above.
        identity: of its connection; None while it has none.
        heard: when it last said something.
        is_known: it has said something but hello, so it has heard that the session is new: a welcome that says so may
            get lost, and then so must the next one say.
        is_too_slow: it has to be cut off.
        most_bytes: see above.
    """

    def __init__(
        self,
        number: int,
        name: bytes,
        service: Service,
        account: Account,
        plans: FieldsCache,
        delivery: Delivery,
        wake: Callable[[Session], None],
        most_bytes: int,
        texts: TextBudget,
    ) -> None:
        self.number = number
        self.name = name
        self.delivery = delivery
        self.identity: bytes | None = None
        self.heard = monotonic()
        self.is_known = False
        self.is_too_slow = False
        self.account = account
        self._service = service
        self._plans = plans
        self._wake = wake
        self.most_bytes = most_bytes
        self._texts = texts
        # By their place in ORDER; the number is that of `_epoch`.
        self._parts: tuple[dict[tuple[ServerHeader, int], list[MessagePiece]], ...] = ({}, {}, {})
        self._versions: tuple[str, ...] = ()  # of the newest results
        self._epoch = 0  # changes with these, so that no part gets ahead of one of other versions
        self._part_bytes = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._encoding: set[int] = set()  # requests whose prompts are being tokenized
        self._encoders: set[asyncio.Task[None]] = set()
        self._random = np.random.default_rng()

    # ---- from the client ---------------------------------------------------------------------------------------------

    def submit(self, message: Submission, columns: Columns) -> None:
        """Takes requests; those that cannot be run are refused, each with its reason.

        Raises:
            ProtocolError, CreditError: none was taken.
        """
        if "ids" in columns:
            self.delivery.check_count(columns["ids"].size)
        requests = submitted(columns, self._random)
        fresh, again = self.delivery.admit(requests.ids)
        with self._answering(requests.ids[fresh]):
            if again:
                self._add_again(again)
            requests = requests.chosen(fresh)
            if not len(requests):
                return
            plan = self._plans.get(bytes(message.fields))
            if requests.is_text:
                self._encode(requests, plan)
            else:
                self._start(requests, plan)

    @contextmanager
    def _answering(self, ids: Int64) -> Iterator[None]:
        """Whatever goes wrong meanwhile, these requests end: none stays open with nobody who works on it."""
        try:
            yield
        except Exception as error:
            if as_api_error(error).code == "internal_error":
                logger.exception("requests of direct submission failed")
            self._withdraw(ids)
            ending = {
                key for waiting in self._parts for parts in waiting.values() for part in parts for key in part.ended
            }
            left = [key for key in ids.tolist() if key in self.delivery.open and key not in ending]
            self.on_failed(np.asarray(left, np.int64), error)

    def cancel(self, message: Cancellation, columns: Columns) -> None:
        """Ends requests, as far as they have not ended. Raises ProtocolError."""
        if message.columns != ("ids",):
            raise ProtocolError("a cancellation has the column 'ids'", "columns")
        ids: Int64 = columns["ids"]
        self.delivery.check_count(ids.size)
        self.on_failed(self._withdraw(ids), CANCELLED)

    def _withdraw(self, ids: Int64) -> Int64:
        """Nobody works on them any more; returns those that somebody worked on."""
        withdrawn: list[int] = self._service.engine.requests.cancel(self, ids).tolist()
        for key in ids.tolist():
            if key in self._encoding:
                self._encoding.discard(key)
                withdrawn.append(key)
            elif task := self._tasks.pop(key, None):
                task.cancel()
                withdrawn.append(key)
        return np.asarray(withdrawn, np.int64)

    def close(self) -> None:
        """The client is gone for good."""
        self._service.engine.requests.cancel(self)
        self._encoding.clear()
        for task in (*self._tasks.values(), *self._encoders):
            task.cancel()
        self._tasks.clear()
        for waiting in self._parts:
            waiting.clear()
        self._part_bytes = 0

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _encode(self, requests: Submitted, plan: RequestFields) -> None:
        """Texts to token ids, in a task. Raises NotServingError or OverloadedError: none is taken."""
        limits = self._service.limits()
        texts: dict[int, str] = {}
        for key, data in zip(requests.ids.tolist(), requests.prompts(), strict=True):
            try:
                texts[key] = self._text(data.tobytes(), limits)
            except ApiError as error:
                self.on_failed(np.asarray([key]), error)
        if texts:
            num_bytes = requests.data.nbytes
            self._texts.take(num_bytes)
            self._encoding.update(texts)
            seeds = requests.seeds[np.isin(requests.ids, list(texts))]
            task = asyncio.create_task(self._encode_all(texts, seeds, plan))
            self._encoders.add(task)
            task.add_done_callback(self._encoders.discard)
            task.add_done_callback(lambda _: self._texts.give_back(num_bytes))

    def _text(self, data: bytes, limits: RequestLimits) -> str:
        """A prompt. Raises ApiError."""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise bad_request(f"'prompt' is not valid UTF-8: {error.reason}", param="prompt") from None
        self._service.check_text(text, "prompt", limits)
        return text

    async def _encode_all(self, texts: dict[int, str], seeds: Int64, plan: RequestFields) -> None:
        ids = np.asarray(list(texts), np.int64)
        with self._answering(ids):
            try:
                prompts = await self._service.tokenize_all(list(texts.values()), plan.add_special_tokens)
            except Exception:
                if self._service.engine.is_closing:  # the threads are gone: what is not taken can be asked for again
                    raise NotServingError("the server is shutting down") from None
                raise
            lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
            data = np.concatenate(prompts)
            mask = np.isin(ids, self._still_encoding(texts))
            self._start(Submitted(ids, lengths, data, seeds).chosen(mask), plan)

    def _still_encoding(self, texts: Iterable[int]) -> list[int]:
        """Those that were not cancelled meanwhile; they are being encoded no more."""
        keys = [key for key in texts if key in self._encoding]
        self._encoding.difference_update(keys)
        return keys

    def _start(self, requests: Submitted, plan: RequestFields) -> None:
        """Token ids to running requests. Raises NotServingError or OverloadedError: none runs."""
        generation = plan.generation
        assert generation.max_tokens is not None
        limits = self._service.limits(generation.n)
        wrong = faults(requests, limits, generation.max_tokens)
        tokens = requests.lengths + np.int64(generation.n * generation.max_tokens)
        for row in np.flatnonzero(tokens > self.account.most_tokens).tolist():
            wrong.setdefault(row, self.account.make_size_error(1, int(tokens[row])))
        good: Bool = np.ones(len(requests), np.bool_)
        good[list(wrong)] = False
        num_free, full = self._num_free(tokens[good])
        if num_free < good.sum():  # the first that fit; the rest may try again
            late = np.flatnonzero(good)[num_free:]
            good[late] = False
            self.account.refuse(late.size)
            self.on_failed(requests.ids[late], full)
        if plan.in_columns:
            self._submit(requests.chosen(good), plan)
        else:
            self._run_each(requests.chosen(good), plan)
        for row, error in wrong.items():
            self.on_failed(requests.ids[row : row + 1], error)

    def _num_free(self, tokens: Int64) -> tuple[int, OverloadedError]:
        """How many of requests with so many tokens there is room for, and why there is none for more."""
        num_free, (num_fit, account) = self._service.engine.num_free, self.account.find_fullest(tokens)
        if not self._service.accounts.queue.is_open(self.account):  # others wait for room, and are first
            return 0, self.account.make_overload_error()
        if num_fit < num_free:
            return num_fit, account.make_overload_error()
        return num_free, OverloadedError("as many requests as limits.max_requests are held")

    def _submit(self, requests: Submitted, plan: RequestFields) -> None:
        if not len(requests):
            return
        generation = plan.generation
        assert generation.max_tokens is not None
        columns = RequestColumns(
            keys=requests.ids,
            lengths=requests.lengths,
            prompts=as_tokens(requests),
            seeds=requests.seeds,
            max_tokens=np.full(len(requests), generation.max_tokens, np.int64),
            n=generation.n,
            sampling=generation.sampling,
            stream=generation.stream,
            priority=generation.priority,
            salt=self._service.accounts.salt_of(self.account, generation.cache_salt),
        )
        self._service.engine.submit(columns, self, self.account.timeout)
        self._service.log_prompts(self.account, requests.prompts())

    def _run_each(self, requests: Submitted, plan: RequestFields) -> None:
        self._service.engine.check_serving(len(requests))
        rows = zip(requests.ids.tolist(), requests.prompts(), requests.seeds.tolist(), strict=True)
        for key, prompt, seed in rows:
            self._tasks[key] = asyncio.create_task(self._run(key, prompt.astype(np.int32), seed, plan))

    async def _run(self, key: int, prompt: Int32, seed: int, plan: RequestFields) -> None:
        name = self.name_request(key)
        request_id.set(name)  # of this task alone
        with self._answering(np.asarray([key])):
            try:
                await run_request(self._service, self.account, plan, key, name, prompt, seed, self.add)
            finally:
                if self._tasks.get(key) is asyncio.current_task():
                    del self._tasks[key]

    def name_request(self, key: int) -> str:
        """The name of a request in the log, and for `EngineControl.abort` where text is wanted of it."""
        return f"zmq-{self.number}-{key}"

    # ---- to the client -----------------------------------------------------------------------------------------------

    def on_tokens(self, block: TokenBlock) -> None:
        """See Sink: tokens of requests in columns."""
        header, columns = block_columns(block, self._service.engine.requests.versions.names)
        self.add(header, columns, block.keys, np.unique(block.keys[block.is_last != 0]).tolist())

    @property
    def takes_offers(self) -> bool:
        """See Sink: tokens are sent in columns."""
        return False

    def offer(self, _token_ids: list[int], _scores: list[Score]) -> bool:
        """See Sink."""
        return False

    def on_prompt(self, key: int, prefilled: Prefilled) -> None:
        """See Sink. No request in columns wants log-probs of its prompt."""
        raise AssertionError(f"request {key}: {prefilled} was not asked for")

    def forget(self, _keys: Int64) -> bool:
        """See Sink. What has come is the client's."""
        return False

    def on_failed(self, keys: Int64, error: Exception) -> None:
        """See Sink. Requests end with an error."""
        if not keys.size:
            return
        known = as_api_error(error)
        header = Error(
            status=known.status,
            code=known.code,
            param=known.param,
            message=known.message,
            retry_after=known.retry_after,
            columns=("ids",),
        )
        self.add(header, {"ids": keys}, keys, keys.tolist(), remember=False)

    def add(
        self, header: ServerHeader, columns: Columns, ids: Int64, ended: list[int], *, remember: bool = True
    ) -> None:
        """Something to be sent. `ids`: whom it is about; `ended`: requests that end with it."""
        for key in ended if self._tasks else ():
            self._tasks.pop(key, None)
        part = MessagePiece(header, columns, ids, ended, remember)
        if isinstance(header, Results) and header.versions != self._versions:
            self._versions, self._epoch = header.versions, self._epoch + 1
        self._parts[ORDER[type(header)]].setdefault((header, self._epoch), []).append(part)
        self._part_bytes += part.num_bytes
        self.is_too_slow |= self._part_bytes + self.delivery.num_bytes > self.most_bytes
        self._wake(self)

    def _add_again(self, ids: list[int]) -> None:
        for message in self.delivery.recall(ids, part_of):
            self.add(message.header, message.columns, message.ids, message.ended, remember=False)

    def take(self) -> list[Outgoing]:
        """Messages to be sent now, as many as the client has acknowledged enough for.

        What belongs together is one message, so the order is not that of arrival; but of each request it is kept.
        """
        messages = []
        for waiting in self._parts:
            while waiting and self.delivery.has_window:
                header, _ = first = next(iter(waiting))
                parts = waiting.pop(first)
                self._part_bytes -= sum(part.num_bytes for part in parts)
                message = merged(header, parts)
                self.delivery.add(message)
                message.header = numbered = replace(header, seq=message.seq)
                message.frames, message.columns = seal(numbered, message.columns)
                messages.append(message)
        return messages

    @property
    def num_bytes(self) -> int:
        """Of all that is kept for the client."""
        return self._part_bytes + self.delivery.num_bytes + self.delivery.history_bytes

    @property
    def is_settled(self) -> bool:
        """The client has acknowledged everything, and nothing is on its way."""
        return not any(self._parts) and self.delivery.is_settled and not self.delivery.open


def merged(header: ServerHeader, parts: list[MessagePiece]) -> Outgoing:
    """One message of parts with equal headers."""
    columns = {name: concat_arrays([part.columns[name] for part in parts]) for name in header.columns}
    ended = [key for part in parts for key in part.ended]
    return Outgoing(header, columns, concat_arrays([part.ids for part in parts]), ended, parts[0].remember)


def part_of(message: Outgoing, rows: Bool) -> Outgoing:
    """Some rows of a message, not to be remembered again."""
    header, columns = message.header, message.columns
    about = set(message.ids[rows].tolist())
    ended = [key for key in message.ended if key in about]
    if isinstance(header, Results):
        columns = chosen(columns, rows)
    return Outgoing(replace(header, seq=0), columns, message.ids[rows], ended, remember=False)
