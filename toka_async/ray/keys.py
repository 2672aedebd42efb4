"""The CURVE keys of a fleet: a pair for its servers and a pair for its clients. They travel as contents of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from toka_async.transport.curve import make_keys

SERVER, CLIENT = "server", "client"


@dataclass(frozen=True, slots=True, repr=False)
class FleetKeys:
    """files: contents by name, as `toka-async keys` makes them. No log shows them."""

    files: dict[str, bytes]

    @classmethod
    def make(cls) -> Self:
        with TemporaryDirectory(prefix="toka-keys-") as folder:
            paths = [path for name in (SERVER, CLIENT) for path in make_keys(Path(folder), name)]
            return cls({path.name: path.read_bytes() for path in paths})

    def write_for_server(self, folder: Path) -> list[str]:
        """Write what a server needs into a private folder; returns its configuration."""
        clients = folder / "clients"
        clients.mkdir()
        self._write(clients / f"{CLIENT}.key")
        return [f"zmq.key={self._write(folder / f'{SERVER}.key_secret')}", f"zmq.clients={clients}"]

    def write_for_client(self, folder: Path) -> tuple[Path, Path]:
        """Write what a client needs into a private folder; returns the paths of `key` and `server_key`."""
        return self._write(folder / f"{CLIENT}.key_secret"), self._write(folder / f"{SERVER}.key")

    def _write(self, path: Path) -> Path:
        path.write_bytes(self.files[path.name])
        return path
