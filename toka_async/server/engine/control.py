"""What a trainer does with the engine: pause, resume, abort, new weights. The one core of all routes for it.

Every action goes to all replicas that are there, and is done when all have answered. What fails on one has failed, and
nothing waits longer than its time-out. Knows no HTTP and no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import numpy as np

from toka_async.arrays import Float32, as_f32, i32_column
from toka_async.control import (
    DEFAULT_VERSION,
    AbandonUpdate,
    Abort,
    AnyAction,
    BeginUpdate,
    Checksum,
    CloseTransfer,
    CommitUpdate,
    Control,
    ControlDone,
    LoadTensors,
    OpenTransfer,
    PartRows,
    PartSum,
    Pause,
    PauseMode,
    ReadTensor,
    ResetPrefixCache,
    Resume,
    SetVersion,
    Sleep,
    Source,
    Transfer,
    VerifyUpdate,
    Wake,
)
from toka_async.server.engine.replicas import Replicas
from toka_async.server.engine.request_table import RequestTable, Sink

logger = logging.getLogger(__name__)

TIMEOUT = 300.0
SHARE = 0.9  # of a time-out that ranks may wait for a trainer, so that they can still say what was missing

Named = tuple[Sink, int | None]  # a request by its key at the sink, or all the sink's requests


class ControlError(Exception):
    """An action was refused or has failed; the message says why. num_written: tensors that were written before that."""

    def __init__(self, message: str, num_written: int = 0) -> None:
        super().__init__(message)
        self.num_written = num_written


class ControlTimeoutError(ControlError):
    """A replica did not answer in time."""


class EngineControl:
    """Actions on all replicas of one engine.

    Args:
        timeout: seconds that an action may take. A pause that waits for requests takes as long as these.

    Attributes:
        weight_version: the name of the weights with which tokens are computed now.
        paused: how the engine was paused; None: it is not.
        is_updating: an update of the weights is open.
        is_torn: an update has failed after some weights were written. Only a whole update ends this.
        is_asleep: the memory of the cache is given back.
    """

    def __init__(self, replicas: Replicas, requests: RequestTable, timeout: float = TIMEOUT) -> None:
        self.weight_version = DEFAULT_VERSION
        self.paused: PauseMode | None = None
        self.is_updating = False
        self.is_torn = False
        self.is_asleep = False
        self._replicas = replicas
        self._requests = requests
        self._timeout = timeout
        self._number = 0
        self._awaited: dict[int, tuple[set[int], asyncio.Future[None], list[ControlDone]]] = {}
        self._names: dict[str, list[Named]] = {}
        self._in_turn = asyncio.Lock()  # of what changes weights and memory
        self._members: list[int] = []  # replicas that take part in the open update
        self._gone = ""  # why one of them is not there any more
        self._watch: asyncio.TimerHandle | None = None  # gives an update up when nobody goes on with it
        self._is_partial = False
        self._has_written = False  # the open update has, or may have, written weights
        self._num_loading = 0  # loads that replicas carry out; all of one update
        self._loaded = asyncio.Event()  # none is left
        self._loaded.set()
        self._num_updates = 0  # that were committed
        replicas.on_return.append(self._greet)

    @property
    def is_paused(self) -> bool:
        return self.paused is not None

    @property
    def world_size(self) -> int:
        """Ranks of all replicas; 0 while these are starting."""
        return sum(max(1, len(each.ready.ranks)) for each in self._replicas.replicas if each.ready is not None)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Waits until no step is computed any more; further requests wait until `resume`. See `Pause` for the modes.

        Raises ControlError, also when the engine is resumed before the pause is complete.
        """
        if mode == "wait":  # computes on
            self._check_whole()
        self.paused = mode
        await self._run_all(Pause(mode=mode), None if mode == "wait" else self._timeout)

    async def resume(self) -> None:
        """Goes on; nothing happens without a pause. Raises ControlError, also while weights are not whole."""
        self._check_whole()
        self.paused = None  # as of the message that goes now: a pause may follow before the answer
        await self._run_all(Resume(), self._timeout)

    def _check_whole(self) -> None:
        """Raises ControlError where nothing may be computed."""
        if self.is_updating or self._num_loading:
            raise ControlError("an update of the weights is open: finish or abandon it first")
        if self.is_torn:
            raise ControlError("an update has failed and left weights of two versions: update all of them first")
        if self.is_asleep:
            raise ControlError("the engine sleeps: wake it first")

    async def abort(self, names: Iterable[str] | None = None, others: Iterable[Named] = ()) -> int:
        """Ends requests with `Reason.ABORT` and the tokens that they have, also those that have not begun.

        names: as `named` was told; None: all requests. others: requests without names. Returns how many requests (one
        a prompt) ended so.
        """
        if names is None:
            return sum(done.count for done in await self._run_all(Abort(everything=True), self._timeout))
        ids: dict[int, set[int]] = {}
        for sink, key in [*others, *(entry for name in names for entry in self._names.get(name, ()))]:
            for replica, request_id in self._requests.list_ids(sink, key):
                ids.setdefault(replica, set()).add(request_id)
        actions = {replica: Abort(request_ids=i32_column(sorted(each))) for replica, each in ids.items()}
        return sum(done.count for done in await self._run(actions, self._timeout))

    @contextmanager
    def named(self, names: Mapping[str, int | None], sink: Sink) -> Iterator[None]:
        """Within, `abort` finds the sink's requests by names: that of a key, or all (None). A name may have several
        owners.
        """
        for name, key in names.items():
            self._names.setdefault(name, []).append((sink, key))
        try:
            yield
        finally:
            for name, key in names.items():
                self._names[name].remove((sink, key))
                if not self._names[name]:
                    del self._names[name]

    async def reset_prefix_cache(self) -> None:
        """New prompts find nothing of earlier ones. Rows that run keep their keys and values. Raises ControlError."""
        await self._run_all(ResetPrefixCache(), self._timeout)
        self._replicas.forget_prompts()

    async def restart_requests(self) -> None:
        """As `reset_prefix_cache`, and rows that run compute their keys and values again. Raises ControlError."""
        async with self._turn():
            if self.is_updating:  # it could not be resumed
                raise ControlError("an update of the weights is open: finish or abandon it first")
            was_paused = self.is_paused
            try:
                await self.pause("retract")
                await self.reset_prefix_cache()
            finally:  # also when the client leaves
                if not was_paused and self.paused == "retract":  # not by somebody else meanwhile
                    await self.resume()

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def open_transfer(self, transfer: Transfer, timeout: float | None = None) -> None:
        """Joins the trainer's group with all ranks of all replicas, in `timeout` seconds, at most the engine's own.

        Requests wait meanwhile. Raises ControlError when a rank cannot.
        """
        first, size = transfer.rank_offset, transfer.world_size
        if first + self.world_size > size:
            raise ControlError(f"rank_offset={first}, world_size={size}: the engine has {self.world_size} ranks")
        timeout = self._timeout if timeout is None else min(timeout, self._timeout)
        async with self._turn():
            try:
                await self._run_all(OpenTransfer(transfer=transfer, seconds=timeout * SHARE), timeout)
            except BaseException:
                for replica in self._replicas.present:  # some may have joined
                    self._replicas.send(replica, Control(number=0, action=CloseTransfer(name=transfer.name)))
                raise

    async def close_transfer(self, name: str) -> None:
        """Leaves a group. Raises ControlError."""
        async with self._turn():
            await self._run_all(CloseTransfer(name=name), self._timeout)

    async def begin_update(self, partial: bool = False) -> None:
        """Stops computing until the update is finished; requests wait, as in a pause that keeps them.

        partial: the update may have some tensors only. Raises ControlError.
        """
        async with self._turn():
            if self.is_updating:
                raise ControlError("an update of the weights is open already")
            if partial and (self.is_torn or self._replicas.outdated):
                raise ControlError("weights are not of one version: update all of them, not some")
            self._members, self._is_partial, self._has_written = self._replicas.present, partial, False
            self._gone = "" if self._members else "no replica is there"
            self.is_updating = True
            await self._update(BeginUpdate())

    async def load(
        self,
        source: Source,
        names: Sequence[str] = (),
        dtypes: Sequence[str] = (),
        shapes: Sequence[Sequence[int]] = (),
    ) -> None:
        """Loads whole tensors of a checkpoint, by their names in it; a Directory has names of its own.

        The next load may be sent meanwhile, so that ranks need not wait for it. When one fails, so does the update: the
        engine stays paused and the version what it was. Raises ControlError, which names the tensor at fault.
        """
        async with self._turn(behind_loads=False):
            self._check_updating()
            self._num_loading += 1
            self._loaded.clear()
        try:
            # The load is sent before anything else has its turn. Replicas carry loads out one after the other.
            action = LoadTensors(
                names=tuple(names),
                dtypes=tuple(dtypes),
                shapes=tuple(map(tuple, shapes)),
                source=source,
                seconds=self._timeout * SHARE,
            )
            await self._update(action, self._timeout * self._num_loading)
            if not self.is_updating:  # an earlier load has failed, after which this one has written
                self.is_torn = True
                raise ControlError("the update was given up meanwhile")
        finally:
            self._num_loading -= 1
            if not self._num_loading:
                self._loaded.set()

    async def finish_update(self, version: str | None = None) -> None:
        """Checks that all tensors have come to all ranks; then steps use them, and new prompts find no older ones.

        version: of the weights from now on; None: it stays. Raises ControlError as `load`.
        """
        async with self._turn():
            self._check_updating()
            await self._update(VerifyUpdate(partial=self._is_partial))
            # It is done now, also if the caller leaves: what others send comes to the schedulers after the message.
            self.weight_version = version = self.weight_version if version is None else version
            self._stop_watch()
            self.is_updating = self.is_torn = False
            self._num_updates += 1
            for replica in set(range(len(self._replicas.replicas))) - set(self._members):
                self._replicas.note_outdated(replica)
            if not self._is_partial:
                self._replicas.note_current(self._members)
            self._replicas.forget_prompts()
            with suppress(ControlError):  # a replica that is gone by now comes back with other weights
                await self._run(dict.fromkeys(self._members, CommitUpdate(version=version)), self._timeout)

    async def abandon_update(self) -> None:
        """Ends an open update without its weights, as a failure does. Raises ControlError if none is open."""
        async with self._turn():
            self._check_updating()
            self._abandon()

    async def set_version(self, version: str) -> None:
        """Names the weights that are there. Raises ControlError."""
        async with self._turn():
            self.weight_version = version
            await self._run_all(SetVersion(version=version), self._timeout)

    async def checksum(self) -> dict[str, str]:
        """Sums of all tensors, see `toka_async.transfer.checksum`. Raises ControlError where replicas differ."""
        async with self._turn():
            answers = await self._run_all(Checksum(), self._timeout)
        sums = [add_parts(answer.sums) for answer in answers]
        for name, value in sums[0].items():
            if any(other.get(name) != value for other in sums):
                raise ControlError(f"replicas have different weights: {name}")
        return sums[0]

    async def read_tensor(self, name: str, num_rows: int) -> Float32:
        """The first rows of a tensor, by its name in a checkpoint. Raises ControlError as `checksum` does, and where
        there is no such tensor or the rows are too many.
        """
        async with self._turn():
            answers = await self._run_all(ReadTensor(name=name, num_rows=num_rows), self._timeout)
        first, *others = (join_rows(name, answer.rows) for answer in answers)
        if not all(np.array_equal(first, other, equal_nan=True) for other in others):
            raise ControlError(f"replicas have different weights: {name}")
        return first

    def _check_updating(self) -> None:
        if not self.is_updating:
            raise ControlError("no update of the weights is open")

    @asynccontextmanager
    async def _turn(self, behind_loads: bool = True) -> AsyncIterator[None]:
        """Waits until no other action on weights or memory is under way, and keeps others waiting.

        behind_loads: also waits for loads, which go on without a turn. Raises ControlTimeoutError.
        """
        taken = False
        try:
            try:
                async with asyncio.timeout(self._timeout):
                    taken = await self._in_turn.acquire()
                    if behind_loads:
                        await self._loaded.wait()
            except TimeoutError:
                raise ControlTimeoutError(f"another action did not end within {self._timeout:g} s") from None
            yield
        finally:
            if taken:
                self._in_turn.release()

    async def _update(self, action: AnyAction, timeout: float | None = None) -> None:
        """A part of the open update, which fails with it. Being cancelled is a failure too."""
        self._stop_watch()
        try:
            if self._gone:
                raise ControlError(self._gone)
            await self._run(dict.fromkeys(self._members, action), timeout or self._timeout)
        except BaseException as error:
            # All have answered that failed with a plain error; otherwise nobody knows.
            wrote = type(error) is not ControlError or error.num_written > 0
            self._has_written |= isinstance(action, LoadTensors) and wrote
            self._abandon()
            raise
        self._has_written |= isinstance(action, LoadTensors)
        self._stop_watch()
        self._watch = asyncio.get_running_loop().call_later(self._timeout, self._give_up)

    def _give_up(self) -> None:
        """The trainer has not gone on with the update for too long."""
        if not self.is_updating:
            return
        if self._in_turn.locked() or self._num_loading:  # something else is done meanwhile
            self._watch = asyncio.get_running_loop().call_later(self._timeout, self._give_up)
            return
        logger.warning("the update of the weights was given up: nothing came for %g s", self._timeout)
        self._abandon()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _abandon(self) -> None:
        """The engine stays paused."""
        self._stop_watch()
        self.is_updating = False
        self.is_torn |= self._has_written
        self.paused = self.paused or "keep"
        for replica in self._replicas.present:
            self._replicas.send(replica, Control(number=0, action=AbandonUpdate()))

    # ---- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses, and from level 1 on gives the memory of the cache back; weights stay.

        mode: what becomes of requests; those that are kept compute their keys and values again after `wake` and
        `resume`. Raises ControlError.
        """
        if level not in (0, 1):
            raise ControlError(f"level {level}: weights stay on the device; levels are 0 (pause) and 1 (cache)")
        if level and mode == "keep":
            mode = "retract"
        async with self._turn():
            if level and self.is_updating:
                raise ControlError("an update of the weights is open: finish or abandon it first")
            await self.pause(mode)
            if level and not self.is_asleep:
                self.is_asleep = True
                try:
                    await self._run_all(Sleep(), self._timeout)
                except ControlError:
                    for replica in self._replicas.present:  # some may sleep
                        self._replicas.send(replica, Control(number=0, action=Wake()))
                    self.is_asleep = False
                    raise

    async def wake(self) -> None:
        """Takes the memory of the cache again. The engine stays paused. Raises ControlError."""
        async with self._turn():
            if self.is_asleep:
                await self._run_all(Wake(), self._timeout)
                self.is_asleep = False

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
            raise ControlError("; ".join(errors), max(answer.count for answer in answers))
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
        """A replica is gone: what it has not answered has failed. It comes back with the weights of its start."""
        reason = f"replica {replica} has stopped: {reason}"
        if self._num_updates or self._has_written or self._num_loading:
            self._replicas.note_outdated(replica)
        if replica in self._members:
            self._gone = self._gone or reason
        for number in list(self._awaited):
            self.on_done(ControlDone(number=number, replica=replica, error=reason))

    def _greet(self, replica: int) -> None:
        """A replica is back: it is paused like the others. Nobody waits for its answer."""
        if self.is_paused:
            self._replicas.send(replica, Control(number=0, action=Pause(mode="keep")))
        if self.is_asleep:
            self._replicas.send(replica, Control(number=0, action=Sleep()))
        self._replicas.send(replica, Control(number=0, action=SetVersion(version=self.weight_version)))


def add_parts(sums: Sequence[PartSum]) -> dict[str, str]:
    """The sum of each tensor of a replica, 16 hexadecimal digits. Raises ControlError where equal parts differ."""
    totals: dict[str, dict[str, int]] = defaultdict(dict)
    for each in sums:
        if totals[each.name].setdefault(each.part, each.total) != each.total:
            raise ControlError(f"ranks have different weights: {each.name}")
    return {name: f"{sum(parts.values()) % 2**64:016x}" for name, parts in sorted(totals.items())}


def join_rows(name: str, parts: Sequence[PartRows]) -> Float32:
    """The rows of a replica's tensor. Raises ControlError where equal parts differ."""
    known: dict[tuple[int, ...], PartRows] = {}
    rows: Float32 = np.empty(parts[0].shape, np.float32)
    for part in parts:
        if known.setdefault(part.starts, part) != part:
            raise ControlError(f"ranks have different weights: {name}")
        where = tuple(slice(start, start + size) for start, size in zip(part.starts, part.sizes, strict=True))
        rows[where] = as_f32(part.values).reshape(part.sizes)
    return rows
