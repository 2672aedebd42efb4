"""The client's side of the protocol, sans IO: open requests, what may be sent, and what was received.

Knows no sockets and no event loop.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Raw

from toka_async.client.errors import ConnectionLostError, RequestError
from toka_async.client.pending import Pending, make_columns, make_lost_error
from toka_async.client.results import read_prompt_scores, split_rows
from toka_async.protocol import (
    VERSIONS,
    Ack,
    Buffer,
    Bye,
    Cancellation,
    Closed,
    Columns,
    Command,
    CommandReply,
    Error,
    Header,
    Hello,
    Ping,
    Pong,
    PromptLogprobs,
    Results,
    Submission,
    Welcome,
    from_server,
    pack,
)

MOST_REQUESTS = 4096  # in one message
MARGIN = 4096  # bytes of a message beside its prompts
RETRIED = ("overloaded", "not_serving")  # codes of temporary errors
Kind = tuple[bytes, bool, bool]  # requests of a message share it: encoded options, is text, may run


class Exchange:
    """One session with a server.

    Args:
        send: gets the frames of each message.
        on_retry: called with the seconds after which `flush` may do more.
        retries: submit requests again that the server has no room for, or has forgotten. Otherwise the first end with
            their error, and a forgotten session is over.

    Attributes:
        welcome: the server's Welcome, while there is a connection.
    """

    def __init__(
        self, send: Callable[[Sequence[Buffer]], object], on_retry: Callable[[float], None], *, retries: bool = True
    ) -> None:
        self._send_frames = send
        self._on_retry = on_retry
        self._retries = retries
        self._session = secrets.token_bytes(16)
        self.welcome: Welcome | None = None
        self._is_introduced = False  # over this connection
        self._open: dict[int, Pending] = {}
        self._waiting: dict[Kind, deque[Pending]] = {}
        self._later: deque[Pending] = deque()  # refused for now
        self._num_sent = 0
        self._cancelled: list[int] = []
        self._received = 0
        self._acknowledged = 0
        self._commands: dict[int, Callable[[CommandReply | Exception], None]] = {}
        self._num_commands = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add(self, pending: Pending) -> None:
        """Queue a request for the next `flush` that may send it."""
        self._open[pending.id] = pending
        self._enqueue(pending)

    def _enqueue(self, pending: Pending) -> None:
        kind = (pending.options.encoded, isinstance(pending.prompt, bytes), pending.may_run)
        queue = self._waiting.get(kind)
        if queue is None:
            queue = self._waiting[kind] = deque()
        queue.append(pending)

    def retry(self, count: int | None = None) -> None:
        """Queue `count` (None: all) of the requests that the server had no room for."""
        for _ in range(len(self._later) if count is None else min(count, len(self._later))):
            pending = self._later.popleft()
            if pending.id in self._open:
                self._enqueue(pending)

    def abandon(self, pending: Pending) -> None:
        """Stop waiting for a request, and cancel it if the server may have it."""
        pending.waiter = None
        if pending.id not in self._open:
            return
        if pending.is_sent:
            self._cancelled.append(pending.id)
        elif not pending.may_run:  # otherwise it is cancelled once it was submitted again
            del self._open[pending.id]

    def command(self, name: str, args: bytes, take: Callable[[CommandReply | Exception], None]) -> int:
        """Send a command; `take` gets its reply, or why there will be none. Returns its number.

        It is sent once: after a break nobody knows whether the server has carried it out. Raises ConnectionLostError.
        """
        if self.welcome is None:
            raise ConnectionLostError("there is no connection now")
        number, self._num_commands = self._num_commands, self._num_commands + 1
        self._commands[number] = take
        self._send(Command(id=number, name=name, args=Raw(args)))
        return number

    def forget_command(self, number: int) -> None:
        """Nobody waits for the reply any more."""
        self._commands.pop(number, None)

    def _fail_commands(self, error: Exception) -> None:
        commands, self._commands = self._commands, {}
        for take in commands.values():
            take(error)

    def fail_all(self, error: Exception) -> None:
        self._fail_commands(error)
        pendings = list(self._open.values())
        self._open.clear()
        self._waiting.clear()
        self._later.clear()
        for pending in pendings:
            pending.fail(error)

    # ---- the connection ----------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        self.welcome = None
        self._is_introduced = True
        self._send(Hello(versions=VERSIONS, session=self._session, received=self._received))

    def note_disconnected(self) -> None:
        self._fail_commands(ConnectionLostError("the connection broke before the command was answered"))
        self.welcome = None
        self._is_introduced = False

    def ping(self) -> None:
        if self.welcome is not None:
            self._send(Ping())

    def say_bye(self) -> None:
        if self.welcome is not None:
            self._send(Bye())

    def flush(self) -> None:
        """Send what may be sent, and acknowledge what was received."""
        if self.welcome is None:
            return
        for kind in list(self._waiting):
            while self._num_sent < self.welcome.credit and (batch := self._take_batch(kind, self.welcome)):
                self._submit(batch)
            if not self._waiting[kind]:
                del self._waiting[kind]
        if self._cancelled:
            ids, self._cancelled = np.asarray(self._cancelled, np.int64), []
            self._send(Cancellation(columns=("ids",)), {"ids": ids})
        if self._acknowledged < self._received:
            self._acknowledged = self._received
            self._send(Ack(ack=self._received))

    def _take_batch(self, kind: Kind, welcome: Welcome) -> list[Pending]:
        """Take the next requests of a kind that fit a message and the credit."""
        queue, batch = self._waiting[kind], list[Pending]()
        most = min(MOST_REQUESTS, welcome.credit - self._num_sent)
        largest = room = welcome.max_message - MARGIN
        width = 1 if kind[1] else 4
        while queue and len(batch) < most:
            pending = queue[0]
            if pending.is_sent or pending.id not in self._open:
                queue.popleft()
                continue
            num_bytes = len(pending.prompt) * width
            if num_bytes > largest or len(kind[0]) > largest:
                field = "prompt" if num_bytes > largest else "fields"
                self._end(queue.popleft(), RequestError(f"'{field}' is too large", field=field, status=413))
                continue
            room -= num_bytes
            if room < 0:
                break
            batch.append(queue.popleft())
        return batch

    def _submit(self, batch: list[Pending]) -> None:
        columns = make_columns(batch)
        for pending in batch:
            pending.is_sent = pending.may_run = True
            if pending.waiter is None:
                self._cancelled.append(pending.id)
        self._num_sent += len(batch)
        self._acknowledged = self._received
        fields = Raw(batch[0].options.encoded)
        self._send(Submission(fields=fields, ack=self._received, columns=tuple(columns)), columns)

    def _send(self, header: Header, columns: Columns | None = None) -> None:
        self._send_frames(pack(header, columns))

    # ---- what the server says ----------------------------------------------------------------------------------------

    def on_frames(self, frames: Sequence[Buffer]) -> None:
        """Handle a message. Raises ProtocolError for anything invalid, ConnectionLostError if the session is over."""
        header, columns = from_server(frames)
        match header:
            case Results() | PromptLogprobs():
                self._on_sequenced(header, columns)
            case Error():
                self._on_error(header, columns)
            case Welcome():
                self._on_welcome(header)
            case CommandReply():
                if (take := self._commands.pop(header.id, None)) is not None:
                    take(header)
            case Closed():
                self._on_closed(header)
            case Pong():
                pass

    def _on_sequenced(self, header: Results | PromptLogprobs, columns: Columns) -> None:
        if not self._is_new(header.seq):
            return
        if isinstance(header, PromptLogprobs):
            if pending := self._open.get(header.id):
                pending.scores = read_prompt_scores(header, columns)
            return
        before = len(self._open)
        for row in split_rows(header, columns):
            pending = self._open.get(row.id)
            if pending is not None and pending.take(row):
                self._close(pending)
        self.retry(before - len(self._open))

    def _is_new(self, seq: int) -> bool:
        """Whether the message was not received before, over a connection that broke."""
        if seq <= self._received:
            return False
        self._received = seq
        return True

    def _on_error(self, error: Error, columns: Columns) -> None:
        if error.seq and not self._is_new(error.seq):
            return
        if "ids" not in columns:
            if error.retry_after is not None:
                self._on_retry(error.retry_after)
            return
        for key in columns["ids"].tolist():
            if pending := self._open.get(key):
                self._on_refused(pending, error)
        if error.code in RETRIED:
            self._on_retry(error.retry_after or 1.0)

    def _on_refused(self, pending: Pending, error: Error) -> None:
        has_told = pending.has_begun and pending.options.stream
        if error.code in RETRIED and self._retries and pending.waiter is not None and not has_told:
            self._num_sent -= pending.is_sent
            pending.is_sent = pending.may_run = False
            pending.restart()
            self._later.append(pending)
        else:
            self._end(pending, RequestError(error.message, field=error.param, status=error.status, code=error.code))

    def _on_welcome(self, welcome: Welcome) -> None:
        """Submit all open requests again; a server that knows the session skips those that it has.

        These go first, so that the others do not take their credit.
        """
        pendings = sorted(self._open.values(), key=lambda pending: not pending.may_run)
        if not (welcome.resumed or self._retries) and pendings and pendings[0].may_run:
            raise ConnectionLostError("the server has forgotten the session")
        self.welcome, self._num_sent = welcome, 0
        self._waiting.clear()
        self._later.clear()
        self._cancelled.clear()
        if not welcome.resumed:
            self._received = self._acknowledged = 0
        for pending in pendings:
            pending.is_sent = False
            if welcome.resumed:
                self._enqueue(pending)
            else:
                self._begin_again(pending)

    def _begin_again(self, pending: Pending) -> None:
        """Submit a request that the server does not know, or end it if a part of its stream came already."""
        pending.may_run = False
        if pending.waiter is None:
            del self._open[pending.id]
        elif pending.has_begun and pending.options.stream:
            self._end(pending, make_lost_error(pending))
        else:
            pending.restart()
            self._enqueue(pending)

    def _on_closed(self, closed: Closed) -> None:
        """Introduce the session again if the server ended it or does not know it, unless it refuses."""
        was_welcome, self.welcome = self.welcome is not None, None
        if closed.code == "refused" or (closed.code == "stopping" and not self._retries):
            raise ConnectionLostError(closed.message)
        if closed.code == "stopping":
            self._on_retry(1.0)
        elif was_welcome or not self._is_introduced:  # otherwise it answers messages of the connection before
            self.introduce()

    def _end(self, pending: Pending, error: Exception) -> None:
        self._close(pending)
        pending.fail(error)

    def _close(self, pending: Pending) -> None:
        del self._open[pending.id]
        self._num_sent -= pending.is_sent
