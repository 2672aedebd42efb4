from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from tests.drivers.until import wait_until
from toka_async.messages import DropStop, ToScheduler
from toka_async.nodes.keys import draw_keys
from toka_async.nodes.leading import listen
from toka_async.topology import SharedKeys
from toka_async.transport.codec import Codec
from toka_async.transport.life_sockets import LifeSockets
from toka_async.transport.zmq_sockets import ZmqInbox, ZmqOutbox

KEYS, WIRE = draw_keys(), Codec[ToScheduler](ToScheduler)


class Life:
    """Processes of a life, each with a context of its own. lost: what they reported."""

    def __init__(self) -> None:
        self.lost: SimpleQueue[str] = SimpleQueue()
        self._open: list[Any] = []
        self._made: list[tuple[LifeSockets, zmq.Context[Any]]] = []

    def sockets(self, keys: SharedKeys | None = KEYS) -> LifeSockets:
        context: zmq.Context[Any] = zmq.Context()
        sockets = LifeSockets(context, keys, 30.0, self.lost.put)
        self._made.append((sockets, context))
        return sockets

    def listen(self, sockets: LifeSockets) -> tuple[str, ZmqInbox[ToScheduler]]:
        """An inbox on a socket that listens already."""
        with listen("127.0.0.1") as listener:
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            inbox = sockets.listen(address, WIRE, listener.detach())
        self._open.append(inbox)
        return address, inbox

    def connect(self, sockets: LifeSockets, address: str) -> ZmqOutbox[ToScheduler]:
        outbox = sockets.connect(address, WIRE)
        self._open.append(outbox)
        return outbox

    def close(self) -> None:
        for each in self._open:
            with suppress(zmq.ZMQError):
                each.close()
        for sockets, context in self._made:
            for monitor in sockets._monitors:
                monitor.close()
            if sockets._authenticator is not None:
                sockets._authenticator.stop()
            context.term()


@pytest.fixture
def life() -> Iterator[Life]:
    made = Life()
    yield made
    made.close()


def test_messages_pass_between_machines(life: Life) -> None:
    address, inbox = life.listen(life.sockets())
    outbox = life.connect(life.sockets(), address)
    outbox.send(DropStop(stop_id=7))
    outbox.send(DropStop(stop_id=8))
    assert [inbox.receive(), inbox.receive()] == [DropStop(stop_id=7), DropStop(stop_id=8)]


def test_a_broken_connection_is_reported(life: Life) -> None:
    address, inbox = life.listen(life.sockets())
    sockets = life.sockets()
    life.connect(sockets, address).send(DropStop(stop_id=7))
    sockets.watch()
    inbox.receive()
    inbox.close()
    assert life.lost.get(timeout=60) == f"the connection to {address} broke"


def test_who_has_other_keys_is_not_heard(life: Life) -> None:
    address, inbox = life.listen(life.sockets())
    own = draw_keys()
    intruder = SharedKeys(KEYS.public, own.secret)  # knows where, and the listener's public key
    stranger = life.sockets(intruder)
    outbox = life.connect(stranger, address)
    stranger.watch()
    outbox.send(DropStop(stop_id=7))
    assert "broke" in life.lost.get(timeout=60)
    life.connect(life.sockets(), address).send(DropStop(stop_id=8))
    heard: list[ToScheduler] = []

    def hears() -> bool:
        heard.extend(inbox.drain())
        return bool(heard)

    wait_until(hears)
    assert heard == [DropStop(stop_id=8)]


def test_unix_sockets_have_no_keys_and_nobody_watches_them(
    life: Life, tmp_path_factory: pytest.TempPathFactory
) -> None:
    address = f"ipc:///tmp/life-{tmp_path_factory.mktemp('s').name}-{id(life)}"
    plain = life.sockets(None)
    inbox, outbox = plain.listen(address, WIRE), plain.connect(address, WIRE)
    plain.watch()
    outbox.send(DropStop(stop_id=9))
    assert inbox.receive() == DropStop(stop_id=9)
    outbox.close()
    inbox.close()
    assert life.lost.empty()
