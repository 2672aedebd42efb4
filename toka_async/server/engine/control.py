"""What a trainer does with the engine: pause, resume, abort, new weights. The one core of all routes for it.

Every action goes to all replicas that are there, and is done when all have answered. What fails on one has failed, and
nothing waits longer than its time-out. Knows no HTTP and no tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from toka_async.arrays import i32_column
from toka_async.control import (
    DEFAULT_VERSION,
    Abort,
    AnyAction,
    Control,
    ControlDone,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
)
from toka_async.server.engine.replicas import Replicas
from toka_async.server.engine.request_table import RequestTable, Sink

TIMEOUT = 300.0


class ControlError(Exception):
    """An action was refused or has failed; the message says why."""


class ControlTimeoutError(ControlError):
    """A replica did not answer in time."""


class EngineControl:
    """Actions on all replicas of one engine.

    Args:
        timeout: seconds that an action may take. A pause that waits for requests takes as long as these.

    Attributes:
        weight_version: the name of the weights with which tokens are computed now.
        paused: how the engine was paused; None: it is not.
    """

    def __init__(self, replicas: Replicas, requests: RequestTable, timeout: float = TIMEOUT) -> None:
        self.weight_version = DEFAULT_VERSION
        self.paused: PauseMode | None = None
        self._replicas = replicas
        self._requests = requests
        self._timeout = timeout
        self._number = 0
        self._awaited: dict[int, tuple[set[int], asyncio.Future[None], list[ControlDone]]] = {}
        self._names: dict[str, Sink] = {}
        replicas.on_return.append(self._greet)

    @property
    def is_paused(self) -> bool:
        return self.paused is not None

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Waits until no step is computed any more; further requests wait until `resume`. See `Pause` for the modes.

        Raises ControlError, also when the engine is resumed before the pause is complete.
        """
        self.paused = mode
        await self._run_all(Pause(mode=mode), None if mode == "wait" else self._timeout)

    async def resume(self) -> None:
        """Goes on; nothing happens without a pause. Raises ControlError."""
        await self._run_all(Resume(), self._timeout)
        self.paused = None

    async def abort(self, names: Iterable[str] | None = None) -> int:
        """Ends requests with `Reason.ABORT` and the tokens that they have, also those that have not begun.

        names: as `named` was told; None: all requests. Returns how many requests (one a prompt) ended so.
        """
        if names is None:
            return sum(done.count for done in await self._run_all(Abort(everything=True), self._timeout))
        ids: dict[int, list[int]] = {}
        for sink in {id(sink): sink for name in names if (sink := self._names.get(name)) is not None}.values():
            for replica, request_id in self._requests.list_ids(sink):
                ids.setdefault(replica, []).append(request_id)
        actions = {replica: Abort(request_ids=i32_column(each)) for replica, each in ids.items()}
        return sum(done.count for done in await self._run(actions, self._timeout))

    @contextmanager
    def named(self, names: Iterable[str], sink: Sink) -> Iterator[None]:
        """Within, `abort` finds the sink's requests by any of the names; the newest owner of a name has it."""
        names = list(names)
        self._names.update(dict.fromkeys(names, sink))
        try:
            yield
        finally:
            for name in names:
                if self._names.get(name) is sink:
                    del self._names[name]

    async def reset_prefix_cache(self) -> None:
        """New prompts find nothing of earlier ones. Rows that run keep their keys and values. Raises ControlError."""
        await self._run_all(ResetPrefixCache(), self._timeout)

    # ---- replicas ----------------------------------------------------------------------------------------------------

    async def _run_all(self, action: AnyAction, timeout: float | None) -> list[ControlDone]:
        replicas = self._replicas.present
        if not replicas:
            raise ControlError("no replica is there")
        return await self._run(dict.fromkeys(replicas, action), timeout)

    async def _run(self, actions: Mapping[int, AnyAction], timeout: float | None) -> list[ControlDone]:
        """Raises ControlError with what each replica says that failed."""
        if not actions:
            return []
        self._number = number = self._number + 1
        waiting, answers = set(actions), list[ControlDone]()
        future = asyncio.get_running_loop().create_future()
        self._awaited[number] = waiting, future, answers
        try:
            for replica, action in actions.items():
                self._replicas.send(replica, Control(number=number, action=action))
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            names = ", ".join(f"replica {replica}" for replica in sorted(waiting))
            what = type(next(iter(actions.values()))).__name__
            raise ControlTimeoutError(f"{what}: no answer from {names} within {timeout:g} s") from None
        finally:
            del self._awaited[number]
        errors = sorted({answer.error for answer in answers if answer.error})
        if errors:
            raise ControlError("; ".join(errors))
        return answers

    def on_done(self, done: ControlDone) -> None:
        """Takes the answer of a replica; one that nobody waits for any more is dropped."""
        waiting, future, answers = self._awaited.get(done.number, (set[int](), None, []))
        if future is None or done.replica not in waiting:
            return
        waiting.discard(done.replica)
        answers.append(done)
        if not waiting and not future.done():
            future.set_result(None)

    def lose(self, replica: int, reason: str) -> None:
        """A replica is gone: what it has not answered has failed."""
        for number in list(self._awaited):
            self.on_done(ControlDone(number=number, replica=replica, error=f"replica {replica} has stopped: {reason}"))

    def _greet(self, replica: int) -> None:
        """A replica is back: it is paused like the others. Nobody waits for its answer."""
        if self.paused is not None:
            self._replicas.send(replica, Control(number=0, action=Pause(mode="keep")))
