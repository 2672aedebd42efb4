"""The leader's process that holds the links to the machines' agents, and passes on between them and the parent.

Loads no torch. What is prepared when is decided in `nodes.coordination`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import zmq

from toka_async.config.load import list_settings
from toka_async.nodes.coordination import Coordination
from toka_async.nodes.facts import collect_model_facts, collect_versions
from toka_async.nodes.keys import derive_keys, draw_keys
from toka_async.nodes.links import NodeLinks
from toka_async.nodes.messages import EndRank, RankGone, RankLine, RankOrder, StartRank
from toka_async.nodes.placing import parse_address
from toka_async.nodes.secret import read_secret
from toka_async.procs.child import (
    Alive,
    Beat,
    ChildSpec,
    Fail,
    Fatal,
    Order,
    ParentLink,
    Prepare,
    Prepared,
    Started,
    Stop,
)

logger = logging.getLogger(__name__)

OVER = "the leader has stopped"


class ParentEnd:
    """Tells the parent what becomes of ranks."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link

    def place(self, replica: int, life: int, ranks: tuple[str, ...], group: str) -> None:
        self._link.report(Prepared(replica, life, ranks, group, draw_keys()))

    def hear(self, name: str, line: bytes) -> None:
        self._link.report(RankLine(name, line))

    def note_gone(self, name: str, message: str) -> None:
        self._link.report(RankGone(name, message))

    def fail(self, message: str) -> None:
        raise StartError(message)


class StartError(Exception):
    """The start cannot succeed, and the user can fix it."""


def run(link: ParentLink) -> None:
    """Coordinate until the parent ends this process."""
    spec, address = link.spec, link.spec.config.cluster.address
    orders: SimpleQueue[Order] = SimpleQueue()
    woken, wake = os.pipe()
    is_over = threading.Event()

    def put(order: Order) -> None:
        orders.put(order)
        os.write(wake, b"\0")

    def stop() -> None:
        put(Stop())
        is_over.wait()

    link.on_beat, link.on_stop = lambda: put(Beat()), stop
    link.hear(put)
    host, _ = parse_address(address, "cluster.address")
    secret = read_secret(os.environ, host, insecure=spec.config.cluster.insecure)
    links = NodeLinks(address, spec.listen_fd, derive_keys(secret), spec.config.server.hang_timeout)
    coordination = make_coordination(spec, ParentEnd(link), links)
    link.report(Started())
    logger.info("waiting for nodes at %s", address)
    poller = zmq.Poller()
    for each in (links.socket, links.monitor, woken):
        poller.register(each, zmq.POLLIN)
    dismissal = (OVER, 0)
    try:
        while True:
            wait = coordination.time_until_due()
            ready = poller.poll(None if wait is None else int(wait * 1000) + 1)
            if any(each == woken for each, _ in ready):
                os.read(woken, 4096)
            for peer, message in links.receive():
                if message is None:
                    coordination.lose(peer)
                else:
                    coordination.take(peer, message)
            while not orders.empty():
                match order := orders.get():
                    case Stop():
                        coordination.dismiss(*dismissal)
                        return
                    case Fail():
                        dismissal = (order.reason, 1)
                    case Beat():
                        link.report(Alive())
                    case _:
                        carry_out(order, coordination)
            coordination.act()
    except StartError as error:
        coordination.dismiss(str(error), 2)
        link.report(Fatal(str(error), user=True))
    finally:
        links.close()
        is_over.set()


def carry_out(order: Order, coordination: Coordination) -> None:
    match order:
        case Prepare():
            coordination.prepare(order.replica, order.life)
        case StartRank():
            coordination.start_rank(order.name, order.rank, order.spec)
        case RankOrder():
            coordination.order(order.name, order.line)
        case EndRank():
            coordination.end_rank(order.name)


def make_coordination(spec: ChildSpec, parent: ParentEnd, links: NodeLinks) -> Coordination:
    config = spec.config
    return Coordination(
        spec.topology.layout,
        config,
        config.cluster.address,
        collect_versions(),
        collect_model_facts(Path(spec.model_dir), with_weights=config.model.needs_weights),
        list_settings(config),
        parent,
        links.send,
        time.monotonic,
    )
