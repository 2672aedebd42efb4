"""The engine of a process, with its sockets to the schedulers and the parent's orders that concern it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import zmq

from toka_async.listening import Delays
from toka_async.messages import ToScheduler, ToServer
from toka_async.procs.child import Alive, Lost, Memory, Order, ParentLink, Silent
from toka_async.server.engine.engine import Engine
from toka_async.transport.codec import Codec
from toka_async.transport.zmq_sockets import ZmqInbox, ZmqOutbox

logger = logging.getLogger(__name__)


class EngineLink:
    """The engine and its sockets. Needs a running event loop.

    orders: of the parent, except losses of replicas, which are handled at once, even while draining. is_ready: set when
    the engine is.
    """

    def __init__(self, link: ParentLink) -> None:
        spec = link.spec
        self._link = link
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: ZmqInbox[ToServer] = ZmqInbox(self._context, spec.topology.server, Codec(ToServer))
        self._outboxes = [self._connect(replica) for replica in range(len(spec.topology.schedulers))]
        self.engine = Engine(
            self._outboxes,
            spec.config.limits.max_requests,
            page_size=spec.config.cache.page_size,
            control_timeout=spec.config.server.control_timeout,
        )
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.is_ready = asyncio.Event()

    def start(self, delays: Delays | None = None) -> None:
        """Begins to take orders and messages. delays: of HTTP connections, logged when the parent asks for news."""
        loop = asyncio.get_running_loop()

        def on_beat() -> None:
            self._link.report(Alive())
            if delays is not None and (line := delays.take_line()) is not None:
                logger.warning(line)

        self._link.on_beat = lambda: loop.call_soon_threadsafe(on_beat)  # the event loop answers: it runs
        self._link.on_order = lambda order: loop.call_soon_threadsafe(self._on_order, order)
        self._inbox.attach(loop, self._on_messages)

    def _on_messages(self, messages: Sequence[ToServer]) -> None:
        self.engine.on_messages(messages)
        if self.engine.ready is not None:
            self.is_ready.set()

    def _on_order(self, order: Order) -> None:
        """Drops what a lost replica has not received: its next life knows nothing of those requests."""
        match order:
            case Lost(replica=replica):
                self._outboxes[replica].drop()
                self._outboxes[replica] = self._connect(replica)
                self.engine.lose(replica, order.life, order.reason, self._outboxes[replica])
            case Silent():
                self.engine.silent = order.names
            case Memory():
                self.engine.memory[order.name] = order.memory
            case _:
                self.orders.put_nowait(order)

    def _connect(self, replica: int) -> ZmqOutbox[ToScheduler]:
        return ZmqOutbox(self._context, self._link.spec.topology.schedulers[replica], Codec(ToScheduler))
