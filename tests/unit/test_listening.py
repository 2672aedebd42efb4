from __future__ import annotations

import resource
import socket
from contextlib import ExitStack, closing

import pytest

from toka_async import listening
from toka_async.config import ConfigError, ServerConfig, ZmqConfig
from toka_async.config.sections import LONGEST
from toka_async.listening import (
    Delays,
    check_admin,
    check_direct,
    find_exposures,
    find_url,
    open_listener,
    raise_limits,
)

TIMEOUT = 60.0  # seconds


def test_a_free_port() -> None:
    with closing(open_listener(ServerConfig(port=0), TIMEOUT)) as listener:
        port = listener.getsockname()[1]
        assert find_url(listener) == f"http://127.0.0.1:{port}"
        with closing(socket.create_connection(("127.0.0.1", port), timeout=5)):
            pass


def test_a_client_may_do_nothing_for_days() -> None:
    """TCP's own timers are shorter."""
    with closing(open_listener(ServerConfig(port=0), LONGEST)) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 32767


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1"), ("localhost", "http://")])
def test_the_url_reaches_it(host: str, url: str) -> None:
    with closing(open_listener(ServerConfig(host=host, port=0), TIMEOUT)) as listener:
        assert find_url(listener).startswith(url)
        address, port = find_url(listener).removeprefix("http://").rsplit(":", 1)
        with closing(socket.create_connection((address.strip("[]"), int(port)), timeout=5)):
            pass


def test_a_port_in_use() -> None:
    with closing(open_listener(ServerConfig(port=0), TIMEOUT)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^server\.port: 127\.0\.0\.1:{port} is in use"):
            open_listener(ServerConfig(port=port), TIMEOUT)


@pytest.mark.parametrize("host", ["no such host", "a" * 300, "203.0.113.1"])
def test_a_wrong_host(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^server\.host: "):
        open_listener(ServerConfig(host=host, port=0), TIMEOUT)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[object] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 100_000))
    assert raise_limits() == []
    assert set_to == [(100_000, 100_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    (files,) = raise_limits()
    assert "4096" in files


def test_connections_that_were_delayed_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "BACKLOG", 1)
    with closing(open_listener(ServerConfig(port=0), TIMEOUT)) as listener, ExitStack() as stack:
        delays = Delays(listener)
        assert delays.take_line() is None
        for _ in range(2):
            stack.enter_context(closing(socket.create_connection(listener.getsockname(), timeout=5)))
        assert delays.take_line() is None
        for _ in range(8):  # one fits no more
            late = stack.enter_context(closing(socket.socket()))
            late.setblocking(False)
            late.connect_ex(listener.getsockname())
        line = delays.take_line()
        assert line is not None
        assert line.startswith("new connections were delayed: more than 1 connections waited")
        late = stack.enter_context(closing(socket.socket()))
        late.setblocking(False)
        late.connect_ex(listener.getsockname())
        assert delays.take_line() is None


def test_a_system_that_counts_nothing() -> None:
    left, right = socket.socketpair()
    with closing(left), closing(right):
        assert Delays(left).take_line() is None
    assert Delays(left).take_line() is None  # closed


@pytest.mark.parametrize(
    "address",
    ["", "ipc:///tmp/x", "ipc://x@y", "tcp://127.0.0.1:1", "tcp://127.9.9.9:*", "tcp://[::1]:1", "tcp://localhost:1"],
)
def test_direct_submission_from_this_machine_needs_no_keys(address: str) -> None:
    check_direct(ZmqConfig(bind=address))


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://eth0:1", "ipc://@name"]
)
def test_direct_submission_that_others_can_reach_needs_keys(address: str) -> None:
    with pytest.raises(ConfigError, match=r"zmq\.key"):
        check_direct(ZmqConfig(bind=address))
    check_direct(ZmqConfig(bind=address, insecure=True))
    check_direct(ZmqConfig(bind=address, key="server.key_secret", clients="clients"))


@pytest.mark.parametrize(
    "address",
    [
        "10211",
        "ipc://",
        "127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://:1",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:99999",
        "udp://h:1",
    ],
)
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match=r"zmq\.bind"):
        check_direct(ZmqConfig(bind=address))


def test_one_key_without_the_others_is_told() -> None:
    with pytest.raises(ConfigError, match=r"zmq\.clients"):
        check_direct(ZmqConfig(bind="tcp://127.0.0.1:1", key="server.key_secret"))


@pytest.mark.parametrize(
    ("host", "certificate", "has_keys", "count"),
    [("127.0.0.1", "", False, 0), ("0.0.0.0", "", False, 2), ("0.0.0.0", "x", False, 1), ("::", "x", True, 0)],
)
def test_what_others_can_reach(host: str, certificate: str, has_keys: bool, count: int) -> None:
    assert len(find_exposures(ServerConfig(host=host, tls_cert=certificate), has_keys=has_keys)) == count


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "llm.example.org", "10.0.0.1"])
def test_others_may_not_change_the_model_without_a_key(host: str) -> None:
    server = ServerConfig(host=host, admin=True)
    with pytest.raises(ConfigError, match=r"^server\.admin: others can reach .* auth\.admin_keys or TOKA_ADMIN_KEYS"):
        check_admin(server, has_keys=False)
    check_admin(server, has_keys=True)
    check_admin(ServerConfig(host=host), has_keys=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_on_this_machine_no_admin_needs_a_key(host: str) -> None:
    check_admin(ServerConfig(host=host, admin=True), has_keys=False)
