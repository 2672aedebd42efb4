"""What one client of direct submission is owed: its open requests, and messages until it has dealt with them.

Every message has a number and is kept until it is acknowledged, so that a connection may break at any moment; what was
acknowledged is remembered for a while, so that a request that is submitted again runs once. Sans IO: knows no sockets,
no time and no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Bool, Int64
from toka_async.protocol import Buffer, Columns, ServerHeader

INCOMPLETE = -1
WINDOW = 32  # messages sent ahead of the last acknowledged one


class CreditError(Exception):
    """More requests are open than the client was allowed."""


@dataclass(slots=True)
class Outgoing:
    """A message to a client.

    ids: the requests that it says something of, with repeats, by the client's ids. ended: those that end with it.
    remember: whether what it says may be asked for again. frames: as it is sent, made once however often that is.
    """

    header: ServerHeader
    columns: Columns
    ids: Int64
    ended: list[int] = field(default_factory=list)
    remember: bool = True
    seq: int = 0
    frames: list[Buffer] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Of memory, about: the columns', and what is noted of each row's request."""
        return 256 + 128 * self.ids.size + sum(column.nbytes for column in self.columns.values())


class Delivery:
    """The account of one client.

    Args:
        credit: requests that may be open at once: from their submission until the message that ends them is
            acknowledged.
        most_remembered: bytes of acknowledged messages that are kept.

    Attributes:
        open: requests that have not ended, each with the number of the last message before it began.
        num_bytes: of messages that are not acknowledged.
        history_bytes: of those that are, and are remembered.
    """

    def __init__(self, credit: int, most_remembered: int) -> None:
        self.credit = credit
        self.open: dict[int, int] = {}
        self.num_bytes = 0
        self._ended: dict[int, int] = {}  # in messages that are not acknowledged; values as in `open`
        self._remembered: dict[int, int] = {}
        self._num_again = 0  # remembered requests that were asked for again, until that is acknowledged
        self._unconfirmed: deque[Outgoing] = deque()
        self._history: deque[Outgoing] = deque()
        self.history_bytes = 0
        self._most_remembered = most_remembered
        self._seq = 0

    @property
    def num_used(self) -> int:
        """Credit in use."""
        return len(self.open) + len(self._ended) + self._num_again

    @property
    def has_window(self) -> bool:
        """Another message may be sent."""
        return len(self._unconfirmed) < WINDOW

    @property
    def is_settled(self) -> bool:
        """Everything was acknowledged."""
        return not self._unconfirmed

    def check_count(self, num_requests: int) -> None:
        """Before anything is done for each of a message's requests. Raises CreditError for more than can ever be."""
        if num_requests > self.credit:
            raise CreditError(f"{num_requests} requests in one message are above the credit of {self.credit}")

    def admit(self, ids: Int64) -> tuple[Bool, list[int]]:
        """Requests are submitted: which are new, and now open; and which ended long ago and are asked for again.

        The rest are under way already.

        Raises:
            CreditError: they are too many; none was taken.
        """
        listed = ids.tolist()
        known = [i for i, key in enumerate(listed) if key in self.open or key in self._ended or key in self._remembered]
        fresh: Bool = np.ones(len(listed), np.bool_)
        fresh[known] = False
        if len(set(listed)) < len(listed):
            first = np.zeros(len(listed), np.bool_)
            first[np.unique(ids, return_index=True)[1]] = True
            fresh &= first
        again = list(dict.fromkeys(listed[i] for i in known if listed[i] in self._remembered))
        num_new = int(fresh.sum()) + len(again)
        if self.num_used + num_new > self.credit:
            raise CreditError(
                f"{self.num_used} requests are open, and {num_new} more are above the credit of {self.credit}"
            )
        new = listed if len(known) == 0 and num_new == len(listed) else ids[fresh].tolist()
        self.open.update(dict.fromkeys(new, self._seq))
        return fresh, again

    def add(self, message: Outgoing) -> None:
        """It is to be sent: it gets its number."""
        self._seq = message.seq = self._seq + 1
        for key in message.ended:
            since = self.open.pop(key, None)
            if since is None:
                self._num_again += 1
            else:
                self._ended[key] = since
        self._unconfirmed.append(message)
        self.num_bytes += message.num_bytes

    def acknowledge(self, seq: int) -> None:
        """The client has dealt with all messages up to that number."""
        while self._unconfirmed and self._unconfirmed[0].seq <= seq:
            message = self._unconfirmed.popleft()
            self.num_bytes -= message.num_bytes
            for key in message.ended:
                since = self._ended.pop(key, None)
                if since is None:
                    self._num_again -= 1
                elif message.remember and since != INCOMPLETE:
                    self._remembered[key] = since
            if message.remember:
                self._history.append(message)
                self.history_bytes += message.num_bytes
        while self.history_bytes > self._most_remembered:
            self._forget(self._history.popleft())

    def forget_all(self) -> None:
        """Nothing that was acknowledged can be asked for again."""
        while self._history:
            self._forget(self._history.popleft())

    def _forget(self, message: Outgoing) -> None:
        """Requests of which a part is gone are not remembered, those that go on included."""
        self.history_bytes -= message.num_bytes
        for key in set(message.ids.tolist()):
            self._remembered.pop(key, None)
            for going_on in (self.open, self._ended):
                if going_on.get(key, message.seq) < message.seq:
                    going_on[key] = INCOMPLETE

    def unconfirmed(self) -> Iterator[Outgoing]:
        """Messages to be sent again on a new connection, in order."""
        return iter(self._unconfirmed)

    def recall(self, ids: Sequence[int], part: Callable[[Outgoing, Bool], Outgoing]) -> list[Outgoing]:
        """What was said of remembered requests, to be said again. `part` takes some rows of a message, as a new one
        that is not remembered.
        """
        recalled = []
        since = min((self._remembered[key] for key in ids), default=0)
        wanted = np.asarray(ids, np.int64)
        for message in self._history:
            if message.seq > since:
                rows: Bool = np.isin(message.ids, wanted)
                rows &= np.asarray(
                    [self._remembered.get(key, INCOMPLETE) < message.seq for key in message.ids.tolist()]
                )
                if rows.any():
                    recalled.append(part(message, rows))
        return recalled

    def check(self) -> None:
        """For tests."""
        assert not self.open.keys() & self._ended.keys()
        assert not self.open.keys() & self._remembered.keys()
        assert not self._ended.keys() & self._remembered.keys()
        assert self.history_bytes == sum(message.num_bytes for message in self._history) <= self._most_remembered
        assert self.num_bytes == sum(message.num_bytes for message in self._unconfirmed)
        assert self.num_used <= self.credit
