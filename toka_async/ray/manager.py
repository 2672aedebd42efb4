"""The actor that keeps a fleet's replicas: places them, starts them again, and knows where they are.

It owns the actors of its replicas, so they end with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from toka_async.ray.placement import explain_waiting
from toka_async.ray.replica import ReplicaActor
from toka_async.ray.status import ReplicaPlace, ReplicaPlan, ReplicaStatus, State, describe_all
from toka_async.restarts import Restarts

LOOK_INTERVAL = 0.25  # seconds between two looks at a placement group, for which Ray has no event without a process
PLACING_PATIENCE = 60.0  # seconds after which a replica without resources is reported
MOST_FAILURES = 3  # starts in a row after which a replica counts as hopeless; it is tried further

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """A replica that is wanted, whether it runs or not."""

    index: int
    group: PlacementGroup
    state: State = "placing"
    since: float = field(default_factory=time.monotonic)
    place: ReplicaPlace | None = None
    problem: str = ""
    failures: int = 0
    actor: Any = None
    task: asyncio.Task[None] | None = None

    def note(self, state: State) -> None:
        if state != self.state:
            self.state, self.since = state, time.monotonic()


class FleetManager:
    """Keeps replicas of a plan: none until `scale`, or those of this actor's life before if it is detached.

    Their placement groups say how many these are: Ray keeps detached groups when this actor is lost.
    """

    def __init__(self, plan: ReplicaPlan, *, is_detached: bool) -> None:
        self._plan = plan
        self._lifetime = "detached" if is_detached else None
        self._members: dict[int, Member] = {}
        self._restarts = Restarts(time.monotonic)
        for index, group in self._find_groups().items():
            self._add(index, group)

    async def get_plan(self) -> ReplicaPlan:
        return self._plan

    async def scale(self, num_replicas: int) -> None:
        """Add replicas, or drain the newest ones. Returns when the drained ones have ended."""
        await asyncio.gather(*self._scale(num_replicas))

    def _scale(self, num_replicas: int) -> list[asyncio.Task[None]]:
        """Start what is missing; returns the tasks that drain what is too much."""
        wanted = sorted(index for index, member in self._members.items() if member.state != "draining")
        too_many = wanted[num_replicas:]
        for _ in range(num_replicas - len(wanted)):
            index = next(index for index in range(len(self._members) + 1) if index not in self._members)
            name = f"{self._plan.fleet}-{index}"
            self._add(index, placement_group([self._plan.make_bundle()], name=name, lifetime=self._lifetime))
        return [asyncio.create_task(self._drain(self._members[index])) for index in too_many]

    def _add(self, index: int, group: PlacementGroup) -> None:
        member = self._members[index] = Member(index, group)
        member.task = asyncio.create_task(self._keep(member))

    async def drain(self, address: str) -> bool:
        """Let a replica finish its requests, and end it for good; False: no replica has this address."""
        for member in self._members.values():
            if member.place is not None and member.place.address == address:
                await self._drain(member)
                return True
        return False

    async def _drain(self, member: Member) -> None:
        """Take the replica from the list, let it finish, and remove it."""
        if member.state == "draining":
            return
        served = member.state == "serving"
        member.note("draining")
        assert member.task is not None
        member.task.cancel()
        with suppress(asyncio.CancelledError):
            await member.task
        if served:
            with suppress(RayError):  # it is lost meanwhile
                await member.actor.drain.remote()
        self._remove(member)

    def _remove(self, member: Member) -> None:
        if member.actor is not None:
            ray.kill(member.actor)
        remove_placement_group(member.group)
        del self._members[member.index]

    async def close(self) -> None:
        """End all replicas at once, and free their resources."""
        for member in [*self._members.values()]:
            if member.task is not None:
                member.task.cancel()
            self._remove(member)

    async def wait_end(self) -> NoReturn:
        """Wait for ever: the actor's end ends the call."""
        await asyncio.Event().wait()
        raise AssertionError

    def _find_groups(self) -> dict[int, PlacementGroup]:
        """Find the fleet's placement groups that an earlier life of this actor has left, by the replica's index."""
        names = (table["name"] for table in placement_group_table().values() if table["state"] != "REMOVED")
        own = [name for name in names if name.startswith(f"{self._plan.fleet}-")]
        return {int(name.rpartition("-")[2]): get_placement_group(name) for name in own}

    async def list_statuses(self) -> list[ReplicaStatus]:
        return [self._describe(self._members[index]) for index in sorted(self._members)]

    async def wait(self, count: int) -> str:
        """Wait until `count` replicas serve, or there is no hope for so many; returns what is missing then."""
        while True:
            statuses = await self.list_statuses()
            hopeless = [each for each in statuses if is_hopeless(each)]
            if sum(each.state == "serving" for each in statuses) >= count:
                return ""
            if len(statuses) < count:
                return f"{count} replicas cannot serve: there are {len(statuses)}"
            if len(statuses) - len(hopeless) < count:
                return describe_all(hopeless)
            await asyncio.sleep(LOOK_INTERVAL)

    def _describe(self, member: Member) -> ReplicaStatus:
        problem = self._explain_waiting() if member.state == "placing" else member.problem
        return ReplicaStatus(
            index=member.index,
            state=member.state,
            life=self._restarts.life(member.index),
            place=member.place if member.state == "serving" else None,
            problem=problem,
            failures=member.failures,
            seconds=time.monotonic() - member.since,
        )

    def _explain_waiting(self) -> str:
        nodes: Sequence[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return explain_waiting(self._plan.make_bundle(), nodes, ray.available_resources())

    async def _keep(self, member: Member) -> None:
        """Keep the replica, life after life, until this task is cancelled."""
        while True:
            try:
                await self._place(member)
                await self._live(member)
            except RayTaskError as error:
                member.problem = " ".join(str(error.cause).split())
            except Exception as error:  # of Ray, when the replica or the head is lost; the rest of its text is advice
                member.problem = str(error).partition("\n")[0]
            member.failures += member.state == "loading"
            member.note("waiting")
            delay = self._restarts.note_lost(member.index)
            logger.warning("%s; it starts again in %g s", self._describe(member).describe(), delay)
            await asyncio.sleep(delay)

    async def _place(self, member: Member) -> None:
        """Wait until the group has its resources, also again after the loss of its node."""
        has_spoken = False
        while placement_group_table(member.group)["state"] != "CREATED":
            member.note("placing")
            if not has_spoken and time.monotonic() - member.since >= PLACING_PATIENCE:
                has_spoken = True
                logger.warning("%s", self._describe(member).describe())
            await asyncio.sleep(LOOK_INTERVAL)

    async def _live(self, member: Member) -> None:
        """Run one life of the replica."""
        plan = self._plan
        member.note("loading")
        member.actor = (
            ray.remote(ReplicaActor)
            .options(
                num_gpus=plan.num_gpus,
                num_cpus=plan.num_cpus,
                resources=dict(plan.resources),
                scheduling_strategy=PlacementGroupSchedulingStrategy(member.group, 0),
                max_restarts=0,  # `_keep` starts the next life, after a failed start too
                max_task_retries=0,
            )
            .remote(plan)
        )
        try:
            member.place = await member.actor.start.remote()
            member.problem, member.failures = "", 0
            member.note("serving")
            self._restarts.note_success(member.index)
            await member.actor.wait_end.remote()
        except Exception:
            ray.kill(member.actor)
            raise


def is_hopeless(status: ReplicaStatus) -> bool:
    """Tells whether nobody should wait for the replica."""
    waits_long = status.state == "placing" and status.seconds >= PLACING_PATIENCE
    return waits_long or status.failures >= MOST_FAILURES
