from __future__ import annotations

import pytest

from tests.fakes.clock import Clock
from toka_async.config import ClusterConfig, ConfigError
from toka_async.nodes import leading
from toka_async.nodes.leading import find_own, listen, open_leader


def test_listens_at_its_own_address() -> None:
    with open_leader(ClusterConfig(nodes=2, address="tcp://127.0.0.1:0")) as leader:
        assert leader.getsockname()[0] == "127.0.0.1"
    with open_leader(ClusterConfig(nodes=2, address="some-name:0", interface="lo")) as leader:
        assert leader.getsockname()[0] == "127.0.0.1"
    with open_leader(ClusterConfig(nodes=2, address="tcp://127.0.0.2:0", interface="lo")) as leader:
        assert leader.getsockname()[0] == "127.0.0.2"  # an address of the interface, too


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (ClusterConfig(nodes=2, address="tcp://203.0.113.9:1"), "203.0.113.9 is not an address of this machine"),
        (ClusterConfig(nodes=2, address="tcp://0.0.0.0:1"), "0.0.0.0 is not an address of this machine"),
        (ClusterConfig(nodes=2, address="udp://a:1"), "expected tcp://HOST:PORT"),
        (ClusterConfig(nodes=2, address="tcp://a:1", interface="ib7"), "'ib7' is no network interface"),
    ],
)
def test_an_address_that_others_cannot_use_is_refused(cluster: ClusterConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_leader(cluster)
    assert message in str(caught.value)


def test_a_name_that_means_this_machine_only_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "resolve_host", lambda _: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"gpu01 is 127\.0\.1\.1 here, which no other machine reaches"):
        open_leader(ClusterConfig(nodes=2, address="tcp://gpu01:1"))


def test_a_name_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Name servers may know an earlier machine of that name, or none."""
    answers = iter(["203.0.113.9", "203.0.113.9", "127.0.0.1"])
    monkeypatch.setattr(leading, "resolve_host", lambda _: next(answers))
    slept: list[float] = []
    cluster = ClusterConfig(nodes=2, address="tcp://localhost:1", join_timeout=9)
    assert find_own(cluster, "localhost", sleep=slept.append) == "127.0.0.1"
    assert len(slept) == 2
    (said,) = caplog.messages
    assert "203.0.113.9 is not an address of this machine; trying again for 9 s" in said


def test_a_name_is_not_waited_for_too_long() -> None:
    clock = Clock()

    def advance(seconds: float) -> None:
        clock.now += seconds

    cluster = ClusterConfig(nodes=2, address="tcp://no such name:1", join_timeout=9)
    with pytest.raises(ConfigError, match="cannot resolve 'no such name'"):
        find_own(cluster, "no such name", clock, advance)


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: is in use"):
            open_leader(ClusterConfig(nodes=2, address=f"tcp://127.0.0.1:{port}"))
