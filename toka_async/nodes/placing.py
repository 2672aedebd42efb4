"""Which machine this is, from options or from what LeaderWorkerSet and Slurm set in the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from toka_async.config import ConfigError

PORT = 10212  # where a leader listens whose address has none
# Of Slurm, those of the step come first: it may have some of the job's machines only, by which it numbers them.
INDEX, SIZE = ("LWS_WORKER_INDEX", "SLURM_NODEID"), ("LWS_GROUP_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
LEADER, NODES = "LWS_LEADER_ADDRESS", ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
FIRST_NODE = re.compile(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\])?([^,\[\]]*)")  # of `gpu[01-04,07],login2`


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A machine's number among `size`, and the leader's host and port."""

    host: str
    port: int
    index: int
    size: int

    @property
    def leader(self) -> str:
        return make_address(self.host, self.port)


def find_place(leader: str, index: int | None, size: int | None, environment: Mapping[str, str]) -> NodePlace:
    """Complete what options say from the environment. Raises ConfigError that names what is missing."""
    leader = leader or _find_leader(environment)
    if not leader:
        raise ConfigError(f"--leader: expected tcp://HOST:PORT; neither {LEADER} nor {NODES[-1]} is set")
    index = _read_number("--index", index, environment, INDEX)
    size = _read_number("--size", size, environment, SIZE)
    if not 0 <= index < size:
        raise ConfigError(f"--index={index}: expected 0 to {size - 1}, since --size={size}")
    host, port = parse_address(leader, "--leader")
    return NodePlace(host, port, index, size)


def parse_address(address: str, name: str) -> tuple[str, int]:
    """Split tcp://HOST[:PORT] or HOST[:PORT]. Raises ConfigError, with `name` for the address."""
    try:
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or (parts.scheme, parts.path.strip("/")) != ("tcp", ""):
        raise ConfigError(f"{name}: expected tcp://HOST:PORT, got {address!r}")
    return host, PORT if port is None else port


def make_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _find_leader(environment: Mapping[str, str]) -> str:
    if address := environment.get(LEADER, ""):
        return address
    nodes = next((environment[name] for name in NODES if environment.get(name)), "")
    match = FIRST_NODE.match(nodes)
    return "" if match is None else f"{match[1]}{match[2] or ''}{match[3]}"


def _read_number(option: str, value: int | None, environment: Mapping[str, str], names: tuple[str, ...]) -> int:
    if value is not None:
        return value
    for name in names:
        if text := environment.get(name, ""):
            if text.isdecimal():
                return int(text)
            raise ConfigError(f"{name}: expected a number, got {text!r}")
    raise ConfigError(f"{option} is missing; {', '.join(names)} are not set either")
