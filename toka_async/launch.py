"""`toka-async serve`, `warm` and `batch run`: prepares what the processes share, runs and supervises them to their end.

Checks all mistakes of users that are cheap to see before any process starts. Loads no torch and knows nothing of HTTP,
nor of models beyond their files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from toka_async.checkpoint.division import check_division, group_experts
from toka_async.checkpoint.generation import read_generation_defaults
from toka_async.checkpoint.hub import resolve_model, resolve_tokenizer
from toka_async.checkpoint.implementation import read_model
from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.config import Config, ConfigError, ParallelConfig
from toka_async.listening import check_admin, check_direct, find_exposures, find_url, open_listener, raise_limits
from toka_async.logs import announce, configure_parent
from toka_async.nodes.leading import open_leader
from toka_async.procs.child import BatchJob, ChildSpec, Prepared, Resources, Started, Status
from toka_async.procs.launched import Launch, make_launch
from toka_async.replica_lives import ReplicaLives, list_replica, name_leader
from toka_async.server.access.keys import read_keys
from toka_async.server.access.origins import read_origins
from toka_async.server.http.tls import tls_context
from toka_async.socket_folder import socket_folder
from toka_async.start_report import start_lines
from toka_async.startup.progress import StartupProgress
from toka_async.supervisor import Supervisor
from toka_async.topology import local_places, local_topology, make_layout

BATCH_DRAIN = 5.0  # seconds for a stopped batch to keep what is done


def serve(config: Config) -> int:
    """Serve until a signal or a failure; returns the exit code.

    Raises:
        ConfigError: the address cannot be used, or needs keys; keys, certificates, origins or names are wrong.
        ModelError: there is no such model or tokenizer, or its files are wrong.
    """
    check_direct(config.zmq)
    tls, keys = tls_context(config.server), read_keys(config.auth, os.environ)
    check_admin(config.server, has_keys=keys.have_admins)
    read_origins(config.auth, config.server.host)
    say, ranks = configure_parent(config.log.format), _Ranks(config.parallel)
    files = find_files(config)
    with closing(open_listener(config.server, config.limits.client_timeout)) as listener, socket_folder() as folder:
        limits = [*raise_limits(), *find_exposures(config.server, has_keys=bool(keys))]
        url = find_url(listener, "http" if tls is None else "https")
        of_all = _make_spec("server", config, folder, files)
        spec, direct = msgspec.structs.replace(of_all, listen_fd=listener.fileno()), ""

        def on_status(status: Status) -> None:
            nonlocal direct
            ranks.hear(status)
            if isinstance(status, Started) and status.direct:
                direct = status.direct

        def on_started() -> None:
            for line in [*limits, *ranks.take_lines()]:
                say(line)
            announce(f"toka-async: serving {spec.served_name} at {url}")
            if direct:
                announce(f"toka-async: direct submission at {direct}")

        # Only the server keeps the listener, so that connections are refused once it stops.
        return _run(spec, folder, config.server.drain_timeout, on_started, on_status, listener.close)


def warm(config: Config) -> int:
    """Start the ranks of one replica as `serve` does, for what that leaves on the disk; returns the exit code.

    FlashInfer's modules are compiled in the foreground. Nothing listens and nothing is served.

    Raises:
        ConfigError: several machines are configured.
        ModelError: as in `serve`.
    """
    if config.cluster.nodes > 1:
        raise ConfigError(f"cluster.nodes={config.cluster.nodes}: warm each machine by a start; use 1 here")
    say, ranks = configure_parent(config.log.format), _Ranks(msgspec.structs.replace(config.parallel, dp=1))
    files = find_files(config)
    with socket_folder() as folder:
        spec = msgspec.structs.replace(_make_spec("server", config, folder, files), warm=True)
        places = local_places(folder, spec.topology.layout)
        children = [child for child in list_replica(spec, places, 0) if child.role == "rank"]
        num_started = 0

        def on_status(status: Status) -> int | None:
            nonlocal num_started
            ranks.hear(status)
            num_started += isinstance(status, Started)
            return 0 if num_started == len(children) else None

        def on_started() -> None:
            for line in ranks.take_lines():
                say(line)

        with Supervisor(0.0, None, on_status, config.server.hang_timeout, say) as supervisor:
            for child in children:
                supervisor.start(make_launch(child))
            code = supervisor.run(on_started)
        return code if num_started == len(children) else code or 1


def run_batch(config: Config, job: BatchJob, show: Callable[[Status], int | None]) -> int:
    """Run a batch without a server until it ends, a signal or a failure; returns the exit code.

    `show` gets the processes' statuses; a number that it returns is the exit code.

    Raises:
        ModelError: as in `serve`.
    """
    say, ranks = configure_parent(config.log.format), _Ranks(config.parallel)
    files = find_files(config)

    def on_status(status: Status) -> int | None:
        ranks.hear(status)
        return show(status)

    def on_started() -> None:
        for line in ranks.take_lines():
            say(line)

    with socket_folder() as folder:
        spec = msgspec.structs.replace(_make_spec("batch", config, folder, files), job=job)
        return _run(spec, folder, BATCH_DRAIN, on_started, on_status)


class _Ranks:
    """Collects what ranks report as they become ready, until the start is over."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._resources: list[Resources] | None = []

    def hear(self, status: Status) -> None:
        if self._resources is not None and isinstance(status, Started) and status.resources is not None:
            self._resources.append(status.resources)

    def take_lines(self) -> list[str]:
        """Take the lines about the start; later reports come from restarted replicas."""
        resources, self._resources = self._resources or [], None
        return list(start_lines(resources, self._parallel))


def _make_spec(role: Literal["server", "batch"], config: Config, folder: Path, files: ModelFiles) -> ChildSpec:
    """The spec of the server or batch process, from which the others' are made."""
    return ChildSpec(
        role=role,
        config=config,
        topology=local_topology(folder, make_layout(config)),
        model_dir=str(files.model_dir),
        tokenizer_dir=str(files.tokenizer_dir),
        served_name=config.model.served_name or config.model.path,
        shape=files.shape,
    )


def _run(
    first: ChildSpec,
    folder: Path,
    drain_timeout: float,
    on_started: Callable[[], None],
    on_status: Callable[[Status], int | None],
    on_first: Callable[[], object] = lambda: None,
) -> int:
    """Run the first process, which is the server or the batch, with all replicas; returns the exit code.

    folder: of sockets. on_first: called when the first process has been started. Raises ConfigError if agents cannot
    join at `cluster.address`.
    """
    config, say = first.config, configure_parent(first.config.log.format)
    leader = open_leader(config.cluster) if config.cluster.nodes > 1 else None
    first = first if leader is None else name_leader(first, leader)

    def relaunch(replica: int, life: int) -> Iterable[Launch]:
        return lives.begin(replica, life)

    def hear(status: Status) -> int | None:
        if isinstance(status, Prepared):
            lives.start(status)
        return on_status(status)

    can_lose = config.parallel.dp > 1 or leader is not None
    supervisor = Supervisor(drain_timeout, relaunch if can_lose else None, hear, config.server.hang_timeout, say)
    with supervisor, nullcontext() if leader is None else closing(leader):
        supervisor.start(make_launch(first))
        on_first()
        lives = ReplicaLives(first, folder, supervisor, leader)
        for replica in range(config.parallel.dp):
            for launch in lives.begin(replica, 0):
                supervisor.start(launch)
        return supervisor.run(on_started)


@dataclass(slots=True, frozen=True)
class ModelFiles:
    """The folders of a model and its tokenizer, and the model's shape."""

    model_dir: Path
    tokenizer_dir: Path
    shape: ModelSpec


def find_files(config: Config) -> ModelFiles:
    """Find the folders of the model and the tokenizer, and check their small files. Raises ModelError."""
    # On a terminal the hub's own bars show downloads.
    with StartupProgress(shown=False).stage("model", f"finding {config.model.path} here or on the hub"):
        model_dir = resolve_model(config.model.path, config.model.needs_weights)
    shape = read_model(model_dir, config.model, config.parallel)
    check_division(group_experts(shape, config.parallel.ep), config.parallel.pp, config.parallel.tp)
    read_generation_defaults(model_dir, shape, use_file=config.model.generation_config == "auto")
    tokenizer_dir = resolve_tokenizer(config.model.tokenizer, model_dir)
    if not (tokenizer_dir / "tokenizer.json").is_file():
        raise ModelError(f"{tokenizer_dir / 'tokenizer.json'}: no such file; set model.tokenizer to a folder with one")
    template = config.model.chat_template
    if template and not Path(template).is_file():
        raise ModelError(f"model.chat_template={template}: no such file")
    return ModelFiles(model_dir.absolute(), tokenizer_dir.absolute(), shape)
