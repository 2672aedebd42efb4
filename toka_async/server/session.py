"""One client of direct submission: takes its requests, and turns what comes back of them into messages.

Many rows at once where token ids are all that is wanted; a task for each request where text is. Knows no sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

import numpy as np
from msgspec.structs import replace

from toka_async.arrays import Bool, Int32, Int64
from toka_async.logs import request_id
from toka_async.openai.errors import ApiError, bad_request
from toka_async.protocol import (
    Cancellation,
    Columns,
    Error,
    Header,
    PromptLogprobs,
    ProtocolError,
    Results,
    Submission,
)
from toka_async.server.account import Account
from toka_async.server.delivery import Delivery, Outgoing
from toka_async.server.direct_requests import run_request
from toka_async.server.direct_rows import DirectJobs, DirectRows, joined
from toka_async.server.errors import as_api_error
from toka_async.server.jobs import NotServingError, OverloadedError
from toka_async.server.plans import Plan, Plans
from toka_async.server.result_columns import chosen, of_rows
from toka_async.server.service import Service
from toka_async.server.submissions import Submitted, as_tokens, faults, submitted

logger = logging.getLogger(__name__)

CANCELLED = ApiError(499, "cancelled by its client", code="cancelled")
ORDER: dict[type[Header], int] = {PromptLogprobs: 0, Results: 1, Error: 2}  # of what is said of one request


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a message; those with equal headers make one message. See `Outgoing`."""

    header: Header
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
        plans: Plans,
        delivery: Delivery,
        wake: Callable[[Session], None],
        most_bytes: int,
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
        self._parts: tuple[dict[Header, list[Part]], ...] = ({}, {}, {})  # by their place in ORDER
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
        requests = submitted(columns, self._random)
        fresh, again = self.delivery.admit(requests.ids)
        if again:
            self._add_again(again)
        requests = requests.chosen(fresh)
        if not len(requests):
            return
        try:
            plan = self._plans.get(bytes(message.fields))
            if requests.is_text:
                self._encode(requests, plan)
            else:
                self._start(requests, plan)
        except (ApiError, NotServingError, OverloadedError) as error:
            self.on_failed(requests.ids, error)

    def cancel(self, message: Cancellation, columns: Columns) -> None:
        """Ends requests, as far as they have not ended. Raises ProtocolError."""
        if message.columns != ("ids",):
            raise ProtocolError("a cancellation has the column 'ids'", "columns")
        ids: Int64 = columns["ids"]
        cancelled = self._service.engine.direct.cancel(self, ids).tolist()
        for key in ids.tolist():
            if key in self._encoding:
                self._encoding.discard(key)
                cancelled.append(key)
            elif task := self._tasks.pop(key, None):
                task.cancel()
                cancelled.append(key)
        if cancelled:
            self.on_failed(np.asarray(cancelled, np.int64), CANCELLED)

    def close(self) -> None:
        """The client is gone for good."""
        self._service.engine.direct.leave(self)
        self._encoding.clear()
        for task in (*self._tasks.values(), *self._encoders):
            task.cancel()
        self._tasks.clear()
        for waiting in self._parts:
            waiting.clear()
        self._part_bytes = 0

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _encode(self, requests: Submitted, plan: Plan) -> None:
        """Texts to token ids, in a task. Raises NotServingError: none is taken."""
        self._service.engine.check_serving()
        texts: dict[int, str] = {}
        for key, data in zip(requests.ids.tolist(), requests.prompts(), strict=True):
            try:
                texts[key] = self._text(data.tobytes())
            except ApiError as error:
                self.on_failed(np.asarray([key]), error)
        if texts:
            self._encoding.update(texts)
            seeds = requests.seeds[np.isin(requests.ids, list(texts))]
            task = asyncio.create_task(self._encode_all(texts, seeds, plan))
            self._encoders.add(task)
            task.add_done_callback(self._encoders.discard)

    def _text(self, data: bytes) -> str:
        """A prompt. Raises ApiError."""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise bad_request(f"'prompt' is not valid UTF-8: {error.reason}", param="prompt") from None
        self._service.check_text(text, "prompt")
        return text

    async def _encode_all(self, texts: dict[int, str], seeds: Int64, plan: Plan) -> None:
        try:
            prompts = await self._service.tokenize_all(list(texts.values()), plan.add_special_tokens)
        except Exception:
            if self._service.engine.is_closing:  # the threads are gone: what is not taken can be asked for again
                error = NotServingError("the server is shutting down")
            elif as_api_error(error).code == "internal_error":
                logger.exception("prompts of direct submission were not tokenized")
            self.on_failed(np.asarray(self._still_encoding(texts), np.int64), error)
            return
        keys = self._still_encoding(texts)
        mask = np.isin(list(texts), keys)
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        data = np.concatenate(prompts)
        requests = Submitted(np.asarray(list(texts), np.int64), lengths, data, seeds).chosen(mask)
        try:
            self._start(requests, plan)
        except (ApiError, NotServingError, OverloadedError) as error:
            self.on_failed(requests.ids, error)

    def _still_encoding(self, texts: Iterable[int]) -> list[int]:
        """Those that were not cancelled meanwhile; they are being encoded no more."""
        keys = [key for key in texts if key in self._encoding]
        self._encoding.difference_update(keys)
        return keys

    def _start(self, requests: Submitted, plan: Plan) -> None:
        """Token ids to running requests. Raises NotServingError or OverloadedError: none runs."""
        generation = plan.generation
        assert generation.max_tokens is not None
        limits = self._service.limits(generation.n)
        wrong = faults(requests, limits, generation.max_tokens)
        tokens = requests.lengths + np.int64(generation.n * generation.max_tokens)
        for row in np.flatnonzero(tokens > self.account.most_tokens).tolist():
            wrong.setdefault(row, self.account.too_large(1, int(tokens[row])))
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
        num_free, (num_fit, account) = self._service.engine.num_free, self.account.fullest(tokens)
        if not self._service.accounts.turns.is_open(self.account):  # others wait for room, and are first
            return 0, self.account.is_full()
        if num_fit < num_free:
            return num_fit, account.is_full()
        return num_free, OverloadedError("as many requests as server.max_requests are held")

    def _submit(self, requests: Submitted, plan: Plan) -> None:
        if not len(requests):
            return
        generation = plan.generation
        assert generation.max_tokens is not None
        jobs = DirectJobs(
            client_ids=requests.ids,
            lengths=requests.lengths,
            prompts=as_tokens(requests),
            seeds=requests.seeds,
            n=generation.n,
            max_tokens=generation.max_tokens,
            sampling=generation.sampling,
            stream=generation.stream,
            priority=generation.priority,
            salt=self._service.accounts.salt_of(self.account, generation.cache_salt),
        )
        self._service.engine.submit_direct(jobs, self)
        self._service.log_prompts(self.account, requests.prompts())

    def _run_each(self, requests: Submitted, plan: Plan) -> None:
        self._service.engine.check_serving(len(requests))
        rows = zip(requests.ids.tolist(), requests.prompts(), requests.seeds.tolist(), strict=True)
        for key, prompt, seed in rows:
            self._tasks[key] = asyncio.create_task(self._run(key, prompt.astype(np.int32), seed, plan))

    async def _run(self, key: int, prompt: Int32, seed: int, plan: Plan) -> None:
        request_id.set(f"zmq-{self.number}-{key}")  # of this task alone
        try:
            await run_request(self._service, self.account, plan, key, prompt, seed, self.add)
        except Exception as error:
            if as_api_error(error).code == "internal_error":
                logger.exception("a request of direct submission failed")
            self.on_failed(np.asarray([key]), error)

    # ---- to the client -----------------------------------------------------------------------------------------------

    def on_rows(self, rows: DirectRows, cached: Int32, ended: Int64) -> None:
        """The engine has tokens of requests in columns."""
        header, columns = of_rows(rows, cached)
        self.add(header, columns, rows.keys, ended.tolist())

    def on_failed(self, client_ids: Int64, error: Exception) -> None:
        """Requests end with an error."""
        if not client_ids.size:
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
        self.add(header, {"ids": client_ids}, client_ids, client_ids.tolist(), remember=False)

    def add(self, header: Header, columns: Columns, ids: Int64, ended: list[int], *, remember: bool = True) -> None:
        """Something to be sent. `ids`: whom it is about; `ended`: requests that end with it."""
        for key in ended if self._tasks else ():
            self._tasks.pop(key, None)
        part = Part(header, columns, ids, ended, remember)
        self._parts[ORDER[type(header)]].setdefault(header, []).append(part)
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
                header = next(iter(waiting))
                parts = waiting.pop(header)
                self._part_bytes -= sum(part.num_bytes for part in parts)
                message = merged(header, parts)
                self.delivery.add(message)
                message.header = replace(header, seq=message.seq)
                messages.append(message)
        return messages

    @property
    def is_settled(self) -> bool:
        """The client has acknowledged everything, and nothing is on its way."""
        return not any(self._parts) and self.delivery.is_settled and not self.delivery.open


def merged(header: Header, parts: list[Part]) -> Outgoing:
    """One message of parts with equal headers."""
    columns = {name: joined([part.columns[name] for part in parts]) for name in header.columns}
    ended = [key for part in parts for key in part.ended]
    return Outgoing(header, columns, joined([part.ids for part in parts]), ended, parts[0].remember)


def part_of(message: Outgoing, rows: Bool) -> Outgoing:
    """Some rows of a message, not to be remembered again."""
    header, columns = message.header, message.columns
    about = set(message.ids[rows].tolist())
    ended = [key for key in message.ended if key in about]
    if isinstance(header, Results):
        columns = chosen(columns, rows)
    return Outgoing(replace(header, seq=0), columns, message.ids[rows], ended, remember=False)
