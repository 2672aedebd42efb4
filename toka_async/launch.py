"""`toka-async serve`, `warm` and `batch run`: prepares what the processes share, runs and supervises them to their end.

Checks all mistakes of users that are cheap to see before any process starts. Loads no torch and knows nothing of HTTP,
nor of models beyond their files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec

from toka_async.checkpoint.division import check_division, group_experts
from toka_async.checkpoint.generation import read_generation_defaults
from toka_async.checkpoint.hub import resolve_model, resolve_tokenizer
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.config import Config, ParallelConfig
from toka_async.listening import check_direct, find_exposures, find_url, open_listener, raise_limits
from toka_async.logs import announce, configure_parent
from toka_async.procs.child import BatchJob, ChildSpec, Resources, Started, Status
from toka_async.server.access.keys import read_keys
from toka_async.server.access.origins import read_origins
from toka_async.server.http.tls import tls_context
from toka_async.socket_folder import socket_folder
from toka_async.start_report import start_lines
from toka_async.startup.progress import StartupProgress
from toka_async.supervisor import Launch, Supervisor
from toka_async.topology import Layout, local_topology

BATCH_DRAIN = 5.0  # seconds for a stopped batch to keep what is done


def serve(config: Config) -> int:
    """Serve until a signal or a failure; returns the exit code.

    Raises:
        ConfigError: the address cannot be used, or needs keys; keys, certificates, origins or names are wrong.
        ModelError: there is no such model or tokenizer, or its files are wrong.
    """
    check_direct(config.zmq)
    tls, keys = tls_context(config.server), read_keys(config.auth, os.environ)
    read_origins(config.auth, config.server.host)
    say, ranks = configure_parent(config.log.format), _Ranks(config.parallel)
    model_dir, tokenizer_dir = find_files(config)
    with closing(open_listener(config.server, config.limits.client_timeout)) as listener, socket_folder() as folder:
        limits = [*raise_limits(), *find_exposures(config.server, has_keys=bool(keys))]
        url = find_url(listener, "http" if tls is None else "https")
        of_all = _make_spec("server", config, folder, model_dir, tokenizer_dir)
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

        with _make_supervisor(spec, config.server.drain_timeout, on_status) as supervisor:
            for child in _list_children(spec):
                supervisor.start(_make_launch(child))
            listener.close()  # only the server keeps it, so connections are refused once it stops
            return supervisor.run(on_started)


def warm(config: Config) -> int:
    """Start the ranks of one replica as `serve` does, for what that leaves on the disk; returns the exit code.

    FlashInfer's modules are compiled in the foreground. Nothing listens and nothing is served.

    Raises:
        ModelError: as in `serve`.
    """
    say, ranks = configure_parent(config.log.format), _Ranks(msgspec.structs.replace(config.parallel, dp=1))
    model_dir, tokenizer_dir = find_files(config)
    with socket_folder() as folder:
        spec = msgspec.structs.replace(_make_spec("server", config, folder, model_dir, tokenizer_dir), warm=True)
        children = [child for child in _list_replica(spec, replica=0) if child.role == "rank"]
        num_started = 0

        def on_status(status: Status) -> int | None:
            nonlocal num_started
            ranks.hear(status)
            num_started += isinstance(status, Started)
            return 0 if num_started == len(children) else None

        def on_started() -> None:
            for line in ranks.take_lines():
                say(line)

        with _make_supervisor(spec, 0.0, on_status) as supervisor:
            for child in children:
                supervisor.start(_make_launch(child))
            code = supervisor.run(on_started)
        return code if num_started == len(children) else code or 1


def run_batch(config: Config, job: BatchJob, show: Callable[[Status], int | None]) -> int:
    """Run a batch without a server until it ends, a signal or a failure; returns the exit code.

    `show` gets the processes' statuses; a number that it returns is the exit code.

    Raises:
        ModelError: as in `serve`.
    """
    say, ranks = configure_parent(config.log.format), _Ranks(config.parallel)
    model_dir, tokenizer_dir = find_files(config)

    def on_status(status: Status) -> int | None:
        ranks.hear(status)
        return show(status)

    def on_started() -> None:
        for line in ranks.take_lines():
            say(line)

    with socket_folder() as folder:
        spec = msgspec.structs.replace(_make_spec("batch", config, folder, model_dir, tokenizer_dir), job=job)
        with _make_supervisor(spec, BATCH_DRAIN, on_status) as supervisor:
            for child in _list_children(spec):
                supervisor.start(_make_launch(child))
            return supervisor.run(on_started)


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


def _make_spec(
    role: Literal["server", "batch"], config: Config, folder: Path, model_dir: Path, tokenizer: Path
) -> ChildSpec:
    """The spec of the server or batch process, from which the others' are made."""
    return ChildSpec(
        role=role,
        config=config,
        topology=local_topology(folder, Layout(config.parallel.dp, config.parallel.pp, config.parallel.tp)),
        model_dir=str(model_dir),
        tokenizer_dir=str(tokenizer),
        served_name=config.model.served_name or config.model.path,
    )


def _make_supervisor(
    spec: ChildSpec, drain_timeout: float, on_status: Callable[[Status], int | None] = lambda _status: None
) -> Supervisor:
    def relaunch(replica: int, life: int) -> Iterator[Launch]:
        return map(_make_launch, _list_replica(spec, replica, life))

    config = spec.config
    say, several = configure_parent(config.log.format), config.parallel.dp > 1
    return Supervisor(drain_timeout, relaunch if several else None, on_status, config.server.hang_timeout, say)


def find_files(config: Config) -> tuple[Path, Path]:
    """Find the folders of the model and the tokenizer, and check their small files. Raises ModelError."""
    weights = config.model.device != "simulated" and config.model.load == "weights"
    # On a terminal the hub's own bars show downloads.
    with StartupProgress(shown=False).stage("model", f"finding {config.model.path} here or on the hub"):
        model_dir = resolve_model(config.model.path, weights)
    spec = read_spec(model_dir, config.model.quantize)
    spec = group_experts(spec, config.parallel.ep)
    check_division(spec, config.parallel.pp, config.parallel.tp)
    read_generation_defaults(model_dir, spec, use_file=config.model.generation_config == "auto")
    tokenizer_dir = resolve_tokenizer(config.model.tokenizer, model_dir)
    if not (tokenizer_dir / "tokenizer.json").is_file():
        raise ModelError(f"{tokenizer_dir / 'tokenizer.json'}: no such file; set model.tokenizer to a folder with one")
    template = config.model.chat_template
    if template and not Path(template).is_file():
        raise ModelError(f"model.chat_template={template}: no such file")
    return model_dir.absolute(), tokenizer_dir.absolute()


def _list_children(server: ChildSpec) -> Iterator[ChildSpec]:
    """The processes, in the order in which they are stopped."""
    yield server
    for replica in range(len(server.topology.ranks)):
        yield from _list_replica(server, replica)


def _list_replica(server: ChildSpec, replica: int, life: int = 0) -> Iterator[ChildSpec]:
    scheduler = msgspec.structs.replace(server, role="scheduler", listen_fd=-1, replica=replica, life=life)
    yield scheduler
    for rank in range(len(server.topology.ranks[replica])):
        yield msgspec.structs.replace(scheduler, role="rank", rank=rank)


def _make_launch(child: ChildSpec) -> Launch:
    return Launch(
        name=child.name,
        command=[sys.executable, "-m", "toka_async.procs", child.name],
        spec=msgspec.json.encode(child),
        replica=-1 if child.role in ("server", "batch") else child.replica,
        inherit=[child.listen_fd] if child.listen_fd >= 0 else [],
    )
