"""Which request of a pool goes where, when, and how often: requests wait here and replicas pull, each ends once.

Sans IO: knows no sockets and no event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from toka_async.client.errors import ConnectionLostError, ReplicaLostError, RequestError
from toka_async.client.exchange import RETRIED
from toka_async.client.pending import News, Pending
from toka_async.client.replica_choice import TOKEN_BYTES, ReplicaChoice, ReplicaRoom, hash_prefix
from toka_async.client.results import Event

MOST_OVERTAKING = 4096  # later requests that a replica may take first because their prefix belongs to it
OVERLOADED = "overloaded"
ENGINE_LOST = ("engine_stopped",)  # codes of errors that say nothing against the request


class DispatchedReplica(ReplicaRoom, ABC):
    """A replica as the dispatcher sees it.

    Attributes:
        waiting: requests whose prefix belongs to it; some may have gone elsewhere.
        is_joined: it may get requests.
        num_failures: since it last answered a request.
    """

    __slots__ = ("is_joined", "num_failures", "waiting")

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.waiting: deque[PoolRequest] = deque()
        self.is_joined = False
        self.num_failures = 0

    @abstractmethod
    def begin(self, attempt: Pending) -> None:
        """Send a request to it."""

    @abstractmethod
    def abandon(self, attempt: Pending) -> None:
        """Cancel a request there."""

    @abstractmethod
    def rest(self, *, is_full: bool) -> None:
        """Get less for a while: it refused a request for now, or lost its engine.

        is_full: it has no room; otherwise it takes nothing.
        """

    @abstractmethod
    def note_idle(self) -> None:
        """Hear that it has no more requests and gets none, having left."""


class PoolRequest:
    """A request of a pool: the caller's, and the attempt that runs, if any, of which this is the waiter.

    num_lost: attempts whose replica was lost. has_begun: a part of the stream was delivered. number: of its arrival.
    """

    __slots__ = (
        "_dispatcher",
        "asked",
        "attempt",
        "has_begun",
        "is_waiting",
        "key",
        "num_lost",
        "num_open",
        "number",
        "replica",
        "samples",
        "tokens",
    )

    def __init__(self, dispatcher: Dispatcher, asked: Pending, number: int) -> None:
        self._dispatcher = dispatcher
        self.asked = asked
        self.number = number
        options = asked.options
        self.samples = self.num_open = max(1, options.n)
        num_prompt = len(asked.prompt) // (TOKEN_BYTES if isinstance(asked.prompt, bytes) else 1)
        self.tokens = num_prompt + self.samples * options.max_tokens
        self.key = hash_prefix(asked.prompt, options.cache_salt)
        self.num_lost = 0
        self.has_begun = self.is_waiting = False
        self.attempt: Pending | None = None
        self.replica: DispatchedReplica | None = None

    def tell(self, pending: Pending, news: News) -> None:
        self._dispatcher.on_news(self, pending, news)


class Dispatcher:
    """The requests of a pool, and the replicas that they may go to.

    Args:
        max_lost: replicas that a request may lose before it ends with ReplicaLostError.
        on_room: called when `pull` may have something to do.

    Attributes:
        num_late: results of attempts that were given up before; they are dropped.
    """

    def __init__(self, max_lost: int, random: Random, on_room: Callable[[], None]) -> None:
        self._max_lost = max_lost
        self._on_room = on_room
        self._choice: ReplicaChoice[DispatchedReplica] = ReplicaChoice(random)
        self._requests: dict[int, PoolRequest] = {}  # by the number of the caller's request; those that have not ended
        self._waiting: deque[PoolRequest] = deque()  # in order of arrival; some may have been taken
        self._num_attempts = 0
        self._pulling: dict[DispatchedReplica, None] = {}  # have room since the last `pull`
        self.num_late = 0

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    # ---- replicas ----------------------------------------------------------------------------------------------------

    def join(self, replica: DispatchedReplica) -> None:
        """Give requests to a replica from now on."""
        assert not replica.is_joined
        replica.is_joined = True
        self._choice.add(replica)
        self._pulling[replica] = None
        self._on_room()

    def leave(self, replica: DispatchedReplica) -> None:
        """Give no more requests to a replica. Those that it has go on."""
        if replica.is_joined:
            replica.is_joined = False
            replica.waiting.clear()
            self._choice.remove(replica)
        if not replica.requests:
            replica.note_idle()

    def resize(self, replica: DispatchedReplica, max_samples: int) -> None:
        """Change how many samples are open at a replica at once. It keeps those that it has."""
        replica.max_samples = max_samples
        if replica.is_joined:
            self._note_room(replica)

    def pull(self) -> None:
        """Send what waits to replicas that have got room."""
        pulling, self._pulling = self._pulling, {}
        for replica in pulling:
            while replica.is_joined and (request := self._pick(replica)) and replica.fits(request.samples):
                self._begin(request, replica)
        while (request := first_waiting(self._waiting)) and (choice := self._choose(request)):
            self._begin(request, choice)

    def _choose(self, request: PoolRequest) -> DispatchedReplica | None:
        return self._choice.choose(request.key, request.samples)

    def _pick(self, replica: DispatchedReplica) -> PoolRequest | None:
        """The oldest request, or the oldest of the replica's own prefixes if that overtakes not too many."""
        oldest, own = first_waiting(self._waiting), first_waiting(replica.waiting)
        if oldest is None or own is None or own.number - oldest.number > MOST_OVERTAKING:
            return oldest
        return own

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, asked: Pending) -> None:
        request = self._requests[asked.id] = PoolRequest(self, asked, asked.id)
        if first_waiting(self._waiting) is None and (replica := self._choose(request)):
            self._begin(request, replica)
            return
        request.is_waiting = True
        self._waiting.append(request)
        if owner := self._choice.find_owner(request.key):
            owner.waiting.append(request)

    def abandon(self, pendings: Sequence[Pending]) -> None:
        """Stop waiting for requests; those that have ended already are passed over."""
        for asked in pendings:
            request = self._requests.pop(asked.id, None)
            if request is None:
                continue
            request.is_waiting = False
            if request.replica is not None and request.attempt is not None:
                request.replica.abandon(request.attempt)
                self._release(request)

    def fail_all(self, error: Exception) -> None:
        requests, self._requests = self._requests, {}
        self._waiting.clear()
        for request in requests.values():
            request.is_waiting = False
            request.attempt = None
            self._tell(request, error)

    def _begin(self, request: PoolRequest, replica: DispatchedReplica) -> None:
        asked, request.is_waiting = request.asked, False
        key, self._num_attempts = self._num_attempts, self._num_attempts + 1
        request.attempt = Pending(key, asked.prompt, asked.seed, asked.options, request)
        request.replica = replica
        replica.requests += 1
        replica.samples += request.samples
        replica.tokens += request.tokens
        self._choice.num_samples += request.samples
        self._choice.note(replica)
        replica.begin(request.attempt)

    def _release(self, request: PoolRequest) -> None:
        """The attempt is over."""
        replica, request.replica, request.attempt = request.replica, None, None
        assert replica is not None
        replica.requests -= 1
        replica.samples -= request.samples
        replica.tokens -= request.tokens
        if replica.is_joined:
            self._choice.num_samples -= request.samples
            self._note_room(replica)
        elif not replica.requests:
            replica.note_idle()

    def _note_room(self, replica: DispatchedReplica) -> None:
        self._choice.note(replica)
        self._pulling[replica] = None
        self._on_room()

    # ---- what replicas say -------------------------------------------------------------------------------------------

    def on_news(self, request: PoolRequest, attempt: Pending, news: News) -> None:
        """Hand on what an attempt brings, or begin the request again elsewhere."""
        replica = request.replica
        if attempt is not request.attempt or replica is None:
            self.num_late += not isinstance(news, Exception)
        elif isinstance(news, Exception):
            self._release(request)
            self._on_failure(request, replica, news)
        else:
            replica.num_failures = 0
            if isinstance(news, Event):
                request.has_begun = True
                request.num_open -= news.finish_reason is not None
                if request.num_open:
                    self._tell(request, news)
                    return
            self._release(request)
            self._end(request, news)

    def _on_failure(self, request: PoolRequest, replica: DispatchedReplica, error: Exception) -> None:
        code = error.code if isinstance(error, RequestError) else None
        is_refused = code in RETRIED
        is_lost = isinstance(error, ConnectionLostError) or code in ENGINE_LOST or (is_refused and request.has_begun)
        if is_refused or code in ENGINE_LOST:  # otherwise the request would go there again at once
            replica.rest(is_full=code == OVERLOADED)
        if not (is_refused or is_lost):
            self._end(request, error)
            return
        if is_lost:
            request.num_lost += 1
            if request.has_begun:
                self._end(request, ReplicaLostError(f"{replica.url} was lost in the middle of a stream: {error}"))
                return
            if request.num_lost > self._max_lost:
                many = f"the request has lost {request.num_lost} replicas, at last {replica.url}: {error}"
                self._end(request, ReplicaLostError(many))
                return
        request.is_waiting = True
        self._waiting.appendleft(request)
        self._on_room()

    def _end(self, request: PoolRequest, news: News) -> None:
        del self._requests[request.asked.id]
        self._tell(request, news)

    def _tell(self, request: PoolRequest, news: News) -> None:
        if request.asked.waiter is not None:
            request.asked.waiter.tell(request.asked, news)


def first_waiting(requests: deque[PoolRequest]) -> PoolRequest | None:
    """The first that still waits; drops those before it."""
    while requests and not requests[0].is_waiting:
        requests.popleft()
    return requests[0] if requests else None
