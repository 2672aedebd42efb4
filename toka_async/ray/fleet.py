"""A fleet of replicas on a Ray cluster, as programs use it. The work is done by an actor (`FleetManager`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from toka_async.client import Pool, SyncPool
from toka_async.config import Config, ConfigError, load_config
from toka_async.llm.engine_options import translate_keywords
from toka_async.ray.keys import FleetKeys
from toka_async.ray.manager import FleetManager
from toka_async.ray.status import ReplicaPlan, ReplicaStatus, describe_all

NAMESPACE = "toka-async"  # of the names of detached fleets
OWN = ("server.port", "server.tls_", "zmq.bind", "zmq.key", "zmq.clients", "zmq.insecure")
REFRESH = 1.0  # seconds


class FleetError(Exception):
    """Replicas cannot be had, or the fleet has ended; the message says what is missing."""


class Fleet:
    """Replicas of a model, each an engine of its own on `tp` x `pp` GPUs of one node, kept by Ray.

    A replica that is lost starts again, here or on another node. Without a `name`, the fleet ends with this process and
    as a context manager at its end. Returns before the replicas serve: see `wait`.

    Args:
        replicas: how many.
        model: a hub id, or a directory that every node has.
        tp, pp: tensor-parallel ranks of a stage, and pipeline stages, of each replica.
        name: makes the fleet detached: it outlives this process and `with`, until `close`. Others get it by
            `Fleet.find(name)`.
        num_cpus: CPUs that a replica takes of its node's, in Ray's count.
        resources: custom resources of Ray that a replica takes, for certain nodes only.
        config: the configuration, as `section={"key": value}`, as `"section.key"`, and as other engines name options,
            such as `max_model_len`.

    Attributes:
        key, server_key: paths of the keys with which `Client` and `Pool` connect, until `close`.

    Raises:
        ConfigError: the configuration is wrong, or sets what the fleet itself decides.
    """

    key: Path
    server_key: Path
    _is_closed = False

    def __init__(
        self,
        replicas: int,
        model: str,
        tp: int = 1,
        pp: int = 1,
        *,
        name: str | None = None,
        num_cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        **config: Any,
    ) -> None:
        overrides = [f"parallel.tp={tp}", f"parallel.pp={pp}", *list_overrides(model, config)]
        plan = ReplicaPlan(
            fleet=f"toka-{secrets.token_hex(8)}",
            overrides=tuple(overrides),
            keys=FleetKeys.make(),
            num_gpus=count_gpus(load_config(None, overrides)),
            num_cpus=num_cpus,
            resources=resources or {},
        )
        lasting = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": -1,
        }
        options: dict[str, Any] = {} if name is None else lasting
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=name is not None)
        manager = ray.remote(FleetManager).options(num_cpus=0, scheduling_strategy=here, **options)
        self._attach(manager.remote(plan, is_detached=name is not None), plan, is_detached=name is not None)
        self.scale(replicas)

    @classmethod
    def find(cls, name: str) -> Self:
        """Find a detached fleet. Raises ValueError if there is none of this name."""
        fleet = cls.__new__(cls)
        fleet._manager = ray.get_actor(name, NAMESPACE)
        fleet._attach(fleet._manager, fleet._ask("get_plan"), is_detached=True)
        return fleet

    def _attach(self, manager: Any, plan: ReplicaPlan, *, is_detached: bool) -> None:
        self._manager = manager
        self._is_detached = is_detached
        self._folder = TemporaryDirectory(prefix="toka-fleet-")
        self.key, self.server_key = plan.keys.write_for_client(Path(self._folder.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._is_detached:
            self.close()

    def wait(self, count: int | None = None, timeout: float | None = None) -> None:
        """Wait until `count` replicas serve. Those that do not are started further.

        Args:
            count: None: all that are wanted now.
            timeout: seconds. None: as long as there is hope. A replica is hopeless after three failed starts in a row,
                and after a minute without the resources that it needs.

        Raises:
            FleetError: there is no hope for so many replicas, or the time is over; says what is missing.
        """
        wanted = sum(each.state != "draining" for each in self.list_statuses()) if count is None else count
        try:
            missing = self._ask("wait", wanted, timeout=timeout)
        except GetTimeoutError:
            missing = describe_all(each for each in self.list_statuses() if each.state != "serving")
        if missing:
            raise FleetError(missing)

    def addresses(self) -> list[str]:
        """List the addresses of direct submission of the replicas that serve now."""
        return [each.place.address for each in self.list_statuses() if each.place is not None]

    def pool(self, *, refresh: float = REFRESH, **options: Any) -> Pool:
        """Make a client of all replicas, those too that come later. Enter it when a replica serves: see `wait`.

        refresh: seconds between two looks at the addresses. options: of `Pool`.
        """
        return Pool(self.addresses, key=self.key, server_key=self.server_key, refresh=refresh, **options)

    def sync_pool(self, *, refresh: float = REFRESH, **options: Any) -> SyncPool:
        """Make a client as `pool` does, for code without asyncio."""
        return SyncPool(self.addresses, key=self.key, server_key=self.server_key, refresh=refresh, **options)

    def list_statuses(self) -> list[ReplicaStatus]:
        """List all replicas, those too that do not serve."""
        statuses: list[ReplicaStatus] = self._ask("list_statuses")
        return statuses

    def scale(self, replicas: int) -> None:
        """Change the number of replicas. Returns when those that are too many have finished their requests and ended.

        New ones are started meanwhile: see `wait`. Raises ValueError for less than none.
        """
        if replicas < 0:
            raise ValueError(f"{replicas} replicas: expected 0 or more")
        self._ask("scale", replicas)

    def drain(self, address: str) -> None:
        """Let a replica finish its requests and end it for good; there is one less then.

        It is no more among the addresses at once. Raises FleetError if no replica has this address.
        """
        if not self._ask("drain", address):
            raise FleetError(f"no replica serves at {address}")

    def close(self) -> None:
        """End all replicas at once, a detached fleet's too. For running requests to finish, `scale(0)` before.

        All calls fail with FleetError from now on, also those of other programs, and the name is free.
        """
        with suppress(FleetError):
            self._ask("close")
            end = self._manager.wait_end.options(max_task_retries=0).remote()
            ray.kill(self._manager)  # returns before it has happened
            ray.wait([end])
        self._is_closed = True
        self._folder.cleanup()

    def _ask(self, method: str, *args: object, timeout: float | None = None) -> Any:
        """Call a method of the manager. Raises GetTimeoutError, or FleetError if the fleet is closed or lost."""
        if self._is_closed:
            raise FleetError("this fleet was closed")
        try:
            return ray.get(getattr(self._manager, method).remote(*args), timeout=timeout)
        except RayActorError as error:
            raise FleetError("the fleet has ended: it was closed, or its manager is lost") from error


def list_overrides(model: str, options: Mapping[str, Any]) -> list[str]:
    """List a configuration as `section.key=value`. Raises ConfigError."""
    keys = {"model.path": model, **dict(translate_keywords(options))}
    for key in keys:
        if key.startswith(OWN):
            raise ConfigError(f"{key}: it is chosen for each replica")
    return [f"{key}={value}" for key, value in keys.items()]


def count_gpus(config: Config) -> int:
    """Count the GPUs of a replica, also those that a simulated one pretends to have."""
    parallel, device = config.parallel, config.model.device
    if device == "cpu" or (device == "simulated" and not config.simulated.gpu):
        return 0
    return parallel.dp * parallel.pp * parallel.tp
