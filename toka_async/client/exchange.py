"""The client's side of the protocol: what is open, what may be sent, what was received. Sans IO.

`send` is given the frames of messages. Knows no sockets and no event loop.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Raw

from toka_async.client.errors import RequestError
from toka_async.client.pending import Pending, lost, submission_columns
from toka_async.client.results import prompt_scores, rows
from toka_async.protocol import (
    VERSIONS,
    Ack,
    Buffer,
    Bye,
    Cancellation,
    Closed,
    Columns,
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

MOST_REQUESTS = 4096  # of one message
MARGIN = 4096  # bytes of a message that are not its prompts
RETRIED = ("overloaded", "not_serving")  # codes of errors that pass
Kind = tuple[bytes, bool, bool]  # of requests that can go in one message: their wishes, text or not, may run or not


class Exchange:
    """One session with a server.

    Args:
        on_retry: called with the seconds after which `flush` may do more.

    Attributes:
        welcome: what the server said of itself, while there is a connection.
        refused: why there will be none.
    """

    def __init__(self, send: Callable[[Sequence[Buffer]], object], on_retry: Callable[[float], None]) -> None:
        self._send_frames = send
        self._on_retry = on_retry
        self._session = secrets.token_bytes(16)
        self.welcome: Welcome | None = None
        self._is_introduced = False  # over this connection
        self.refused: str | None = None
        self._open: dict[int, Pending] = {}
        self._waiting: dict[Kind, deque[Pending]] = {}
        self._later: deque[Pending] = deque()  # refused for now
        self._num_sent = 0
        self._cancelled: list[int] = []
        self._received = 0
        self._acknowledged = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add(self, pending: Pending) -> None:
        """Sent by the next `flush` that may."""
        self._open[pending.id] = pending
        self._wait(pending)

    def _wait(self, pending: Pending) -> None:
        kind = (pending.wishes.encoded, isinstance(pending.prompt, bytes), pending.may_run)
        queue = self._waiting.get(kind)
        if queue is None:
            queue = self._waiting[kind] = deque()
        queue.append(pending)

    def retry(self, count: int | None = None) -> None:
        """So many (None: all) of those that the server had no room for are sent by the next `flush`."""
        for _ in range(len(self._later) if count is None else min(count, len(self._later))):
            pending = self._later.popleft()
            if pending.id in self._open:
                self._wait(pending)

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for it any more."""
        pending.waiter = None
        if pending.id not in self._open:
            return
        if pending.is_sent:
            self._cancelled.append(pending.id)
        elif not pending.may_run:  # else it is cancelled when the server has been asked for it again
            del self._open[pending.id]

    def fail_all(self, error: Exception) -> None:
        """Nothing more comes."""
        pendings = list(self._open.values())
        self._open.clear()
        self._waiting.clear()
        self._later.clear()
        for pending in pendings:
            pending.fail(error)

    # ---- the connection ----------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """There is a new connection: introduces the session."""
        self.welcome = None
        self._is_introduced = True
        self._send(Hello(versions=VERSIONS, session=self._session, received=self._received))

    def disconnected(self) -> None:
        self.welcome = None
        self._is_introduced = False

    def ping(self) -> None:
        if self.welcome is not None:
            self._send(Ping())

    def bye(self) -> None:
        if self.welcome is not None:
            self._send(Bye())

    def flush(self) -> None:
        """Sends what may be sent, and acknowledges what was received."""
        if self.welcome is None:
            return
        for kind in list(self._waiting):
            while self._num_sent < self.welcome.credit and (batch := self._batch(kind, self.welcome)):
                self._submit(batch)
            if not self._waiting[kind]:
                del self._waiting[kind]
        if self._cancelled:
            ids, self._cancelled = np.asarray(self._cancelled, np.int64), []
            self._send(Cancellation(columns=("ids",)), {"ids": ids})
        if self._acknowledged < self._received:
            self._acknowledged = self._received
            self._send(Ack(ack=self._received))

    def _batch(self, kind: Kind, welcome: Welcome) -> list[Pending]:
        """The next requests of a kind that fit a message and the credit."""
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
        columns = submission_columns(batch)
        for pending in batch:
            pending.is_sent = pending.may_run = True
            if pending.waiter is None:
                self._cancelled.append(pending.id)
        self._num_sent += len(batch)
        self._acknowledged = self._received
        fields = Raw(batch[0].wishes.encoded)
        self._send(Submission(fields=fields, ack=self._received, columns=tuple(columns)), columns)

    def _send(self, header: Header, columns: Columns | None = None) -> None:
        self._send_frames(pack(header, columns))

    # ---- what the server says ----------------------------------------------------------------------------------------

    def on_frames(self, frames: Sequence[Buffer]) -> None:
        """Takes a message. Raises ProtocolError for what is none."""
        header, columns = from_server(frames)
        match header:
            case Results() | PromptLogprobs():
                self._on_sequenced(header, columns)
            case Error():
                self._on_error(header, columns)
            case Welcome():
                self._on_welcome(header)
            case Closed():
                self._on_closed(header)
            case Pong():
                pass

    def _on_sequenced(self, header: Results | PromptLogprobs, columns: Columns) -> None:
        if not self._is_new(header.seq):
            return
        if isinstance(header, PromptLogprobs):
            if pending := self._open.get(header.id):
                pending.scores = prompt_scores(header, columns)
            return
        before = len(self._open)
        for row in rows(header, columns):
            pending = self._open.get(row.id)
            if pending is not None and pending.take(row):
                self._close(pending)
        self.retry(before - len(self._open))

    def _is_new(self, seq: int) -> bool:
        """Whether it was not received before, over a connection that broke."""
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
        if error.code in RETRIED and pending.waiter is not None and not (pending.has_begun and pending.wishes.stream):
            self._num_sent -= pending.is_sent
            pending.is_sent = pending.may_run = False
            pending.restart()
            self._later.append(pending)
        else:
            self._end(pending, RequestError(error.message, field=error.param, status=error.status, code=error.code))

    def _on_welcome(self, welcome: Welcome) -> None:
        """What is open is submitted again; a server that knows the session passes over what it has.

        What it may have is first, so that the rest does not take the credit that it has.
        """
        pendings = sorted(self._open.values(), key=lambda pending: not pending.may_run)
        self.welcome, self._num_sent = welcome, 0
        self._waiting.clear()
        self._later.clear()
        self._cancelled.clear()
        if not welcome.resumed:
            self._received = self._acknowledged = 0
        for pending in pendings:
            pending.is_sent = False
            if welcome.resumed:
                self._wait(pending)
            else:
                self._begin_again(pending)

    def _begin_again(self, pending: Pending) -> None:
        """The server knows nothing of it."""
        pending.may_run = False
        if pending.waiter is None:
            del self._open[pending.id]
        elif pending.has_begun and pending.wishes.stream:
            self._end(pending, lost(pending))
        else:
            pending.restart()
            self._wait(pending)

    def _on_closed(self, closed: Closed) -> None:
        """The session is over, or was never known here."""
        was_welcome, self.welcome = self.welcome is not None, None
        if closed.code == "refused":
            self.refused = closed.message
        elif closed.code == "stopping":
            self._on_retry(1.0)
        elif was_welcome or not self._is_introduced:  # else it answers what was left of the connection before
            self.connected()

    def _end(self, pending: Pending, error: Exception) -> None:
        self._close(pending)
        pending.fail(error)

    def _close(self, pending: Pending) -> None:
        del self._open[pending.id]
        self._num_sent -= pending.is_sent
