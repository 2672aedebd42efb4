from __future__ import annotations

from pathlib import Path

from toka_async.ray.keys import FleetKeys
from toka_async.transport.curve import check_clients, read_pair, read_public


def test_servers_and_clients_get_what_they_need_and_no_more(tmp_path: Path) -> None:
    keys, server = FleetKeys.make(), tmp_path / "server"
    server.mkdir()
    options = dict(option.split("=") for option in keys.write_for_server(server))
    check_clients(Path(options["zmq.clients"]))
    key, server_key = keys.write_for_client(tmp_path)
    assert read_public(server_key) == read_pair(Path(options["zmq.key"])).public
    assert read_public(Path(options["zmq.clients"]) / "client.key") == read_pair(key).public
    assert {path.name for path in server.rglob("*.key_secret")} == {"server.key_secret"}
    assert {path.name for path in tmp_path.glob("*.key_secret")} == {"client.key_secret"}


def test_no_log_shows_them() -> None:
    keys = FleetKeys.make()
    assert not any(line in repr(keys) for text in keys.files.values() for line in text.decode().splitlines() if line)
