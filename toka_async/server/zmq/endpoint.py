"""The public ZeroMQ endpoint: connections and the sessions behind them, which outlive a connection for a while.

Nothing that a client sends ends it: what is no message of the protocol is answered with an error. Everything that a
client is owed is bounded, and all of it together; who does not take it is cut off. With keys, no client has so many
sessions that another one gets none. Knows nothing of how requests are run.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from toka_async.config import ZmqConfig
from toka_async.protocol import (
    VERSIONS,
    Ack,
    Buffer,
    Bye,
    Cancellation,
    Closed,
    Columns,
    Command,
    CommandReply,
    Error,
    FromClient,
    Header,
    Hello,
    Ping,
    Pong,
    ProtocolError,
    Submission,
    Welcome,
    from_client,
    pack,
)
from toka_async.server.generate.service import Service
from toka_async.server.limits.account import Account
from toka_async.server.zmq.commands import Commands
from toka_async.server.zmq.delivery import WINDOW, CreditError, Delivery
from toka_async.server.zmq.fields_cache import FieldsCache
from toka_async.server.zmq.session import Session
from toka_async.server.zmq.submissions import TextBudget
from toka_async.transport.zmq_frames import Frame, RouterSocket

logger = logging.getLogger(__name__)

MOST_SESSIONS = 1024
REMEMBERED = 4  # the share of `zmq.buffer_mb` that is for what was acknowledged: a quarter
BUFFERS = 4  # times `zmq.buffer_mb`: all that is kept for clients
TEXTS = 8  # times `max_body_mb`: texts that are being tokenized
NOT_KNOWN = Closed(code="unknown", message="say hello first")


class Endpoint:
    """All clients of direct submission.

    Args:
        router: the socket; attached here.
        commands: carries out those of trainers; None: they are refused.
    """

    def __init__(
        self, router: RouterSocket, service: Service, config: ZmqConfig, commands: Commands | None = None
    ) -> None:
        self._router = router
        self._service = service
        self._config = config
        self._plans = FieldsCache(service)
        self._sessions: dict[bytes, Session] = {}  # by name
        self._connected: dict[bytes, Session] = {}  # by the connection's identity
        self._timers: dict[int, asyncio.TimerHandle] = {}  # by the session's number
        self._num_sessions = 0  # ever
        self._awake: dict[Session, None] = {}
        self._kept: dict[Session, int] = {}  # bytes of each session, as last seen
        self._kept_bytes = 0  # their sum
        self._most_kept = BUFFERS * config.buffer_mb << 20
        self._texts = TextBudget(TEXTS * service.config.max_body_mb << 20)
        self._commands = commands
        self._stopping = False
        self._settled = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        router.attach(self._loop, self._on_frames)
        watch = service.engine.metrics.watch_gauge
        watch("zmq_clients", "clients of direct submission, those too that may come back", lambda: self.num_sessions)
        watch("zmq_clients_connected", "of these: now", lambda: len(self._connected))
        watch("zmq_connections", "ZeroMQ connections, clients or not", lambda: router.num_connections)
        watch("zmq_buffer_bytes", "results that clients have not acknowledged", lambda: self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of results that clients have not acknowledged."""
        return sum(session.delivery.num_bytes for session in self._sessions.values())

    @property
    def address(self) -> str:
        return self._router.address

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def close(self, timeout: float) -> None:
        """Takes no more; gives clients so many seconds to acknowledge what has ended."""
        self._stopping = True
        self._flush()
        self._check_settled()
        try:
            await asyncio.wait_for(self._settled.wait(), timeout)
        except TimeoutError:
            logger.info("clients of direct submission have not taken everything")
        for session in list(self._sessions.values()):
            self._end(session, Closed(code="stopping", message="the server is shutting down"))
        self._router.close(linger=500)

    # ---- what clients say --------------------------------------------------------------------------------------------

    def _on_frames(self, frames: list[Frame]) -> None:
        identity, columns = bytes(frames[0]), Columns()
        try:
            header, columns = from_client(frames[1:])
            self._on_message(identity, header, columns)
        except ProtocolError as error:
            self._refuse(identity, 400, "protocol", error.field, str(error), columns)
        except CreditError as error:
            self._refuse(identity, 429, "credit", "ids", str(error), columns)
        except Exception:
            logger.exception("a message of direct submission failed")
            self._send(identity, Error(status=500, code="internal_error", message="internal error"))

    def _refuse(
        self, identity: bytes, status: int, code: str, field: str | None, message: str, columns: Columns
    ) -> None:
        """A whole message, with all of its requests: none of them was taken, so none of them counts.

        More of them than can ever be one client's are not named again.
        """
        is_named = "ids" in columns and columns["ids"].size <= self._config.credit
        ids = {"ids": columns["ids"]} if is_named else {}
        self._send(identity, Error(status=status, code=code, param=field, message=message, columns=tuple(ids)), ids)

    def _on_message(self, identity: bytes, header: FromClient, columns: Columns) -> None:
        if isinstance(header, Hello):
            self._on_hello(identity, header)
            return
        session = self._connected.get(identity)
        if session is None:
            self._send(identity, NOT_KNOWN)
            return
        session.heard, session.is_known = monotonic(), True
        match header:
            case Submission():
                self._acknowledge(session, header.ack)
                session.submit(header, columns)
            case Ack():
                self._acknowledge(session, header.ack)
            case Cancellation():
                session.cancel(header, columns)
            case Ping():
                self._send(identity, Pong())
            case Command():
                self._command(identity, session, header)
            case Bye():
                self._end(session, None)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        if not set(hello.versions) & set(VERSIONS):
            spoken = ", ".join(map(str, VERSIONS))
            self._send(identity, Closed(code="refused", message=f"this server speaks version {spoken} of the protocol"))
            return
        if self._stopping:
            self._send(identity, Closed(code="stopping", message="the server is shutting down"))
            return
        ready = self._service.engine.ready
        if ready is None:  # later a client that comes back is let in whatever its requests are told: it is owed results
            starting = "the engine is still starting"
            self._send(identity, Error(status=503, code="not_serving", message=starting, retry_after=1))
            return
        limits = self._service.limits_of(ready)
        session = self._sessions.get(hello.session)
        resumed, account = session is not None and session.is_known, self._account()
        if session is None:
            if not self._has_room(account):
                self._send(identity, Error(status=429, code="overloaded", message="too many clients", retry_after=1))
                return
            session = self._begin(hello.session, account)
        elif session.account is not account:
            self._send(identity, Closed(code="refused", message="the session is another client's"))
            return
        self._connect(session, identity)
        welcome = Welcome(
            version=max(set(hello.versions) & set(VERSIONS)),
            resumed=resumed,
            credit=session.delivery.credit,
            window=WINDOW,
            heartbeat=self._config.grace / 3,
            max_seqs=ready.max_seqs * len(self._service.engine.replicas.replicas),
            model=self._service.name,
            vocab_size=limits.vocab_size,
            max_context=min(limits.max_context, limits.cache_tokens),
            max_n=limits.max_n,
            max_message=self._service.config.max_body_mb << 20,
        )
        self._send(identity, welcome)
        if resumed:
            self._acknowledge(session, hello.received)
        for message in session.delivery.unconfirmed():
            self._send_frames(identity, message.frames)

    def _acknowledge(self, session: Session, seq: int) -> None:
        session.delivery.acknowledge(seq)
        self._wake(session)

    def _command(self, identity: bytes, session: Session, command: Command) -> None:
        if self._commands is None:
            self._send(identity, CommandReply(id=command.id, error="the engine takes no commands here: server.admin"))
            return
        self._commands.start(command, session, self._router.sender, lambda reply: self._send(identity, reply))

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def _account(self) -> Account:
        """Of a client's public key, whatever its sessions; without keys nobody can tell clients apart."""
        accounts, sender = self._service.accounts, self._router.sender
        return accounts.open(f"client {sender}", cache_owner=f"client {sender}") if sender else accounts.total

    def _has_room(self, account: Account) -> bool:
        """For one more session. A key has no more of them than are left for the others."""
        num_free = MOST_SESSIONS - len(self._sessions)
        if account is self._service.accounts.total:
            return num_free > 0
        return sum(session.account is account for session in self._sessions.values()) < num_free

    def _begin(self, name: bytes, account: Account) -> Session:
        self._num_sessions += 1
        buffered = self._config.buffer_mb << 20
        delivery = Delivery(self._config.credit, buffered // REMEMBERED)
        session = Session(
            self._num_sessions, name, self._service, account, self._plans, delivery, self._wake, buffered, self._texts
        )
        self._sessions[name] = session
        self._expect(session, self._config.grace)
        return session

    def _connect(self, session: Session, identity: bytes) -> None:
        """The session goes on over this connection, and another session that was on it stays without one.

        The connection on which the session was before is ended, with what waits there.
        """
        if session.identity not in (None, identity):
            self._router.cut(session.identity)
        self._disconnect(session)
        if other := self._connected.get(identity):
            self._disconnect(other)
        session.identity, session.heard = identity, monotonic()
        self._connected[identity] = session
        self._router.keep(identity)

    def _disconnect(self, session: Session) -> None:
        if session.identity is not None:
            del self._connected[session.identity]
            self._router.release(session.identity)
            session.identity = None

    def _expect(self, session: Session, seconds: float) -> None:
        """Unless it says something until then, the client is gone."""
        self._timers[session.number] = self._loop.call_later(seconds, self._check_alive, session)

    def _check_alive(self, session: Session) -> None:
        left = session.heard + self._config.grace - monotonic()
        if left > 0:
            self._expect(session, left)
        else:
            logger.info("a client of direct submission is gone; %d requests cancelled", len(session.delivery.open))
            self._end(session, Closed(code="unknown", message="nothing was heard for zmq.grace seconds"))

    def _end(self, session: Session, reason: Closed | None) -> None:
        """What runs of it is cancelled, and what it is owed is forgotten."""
        if reason is not None and session.identity is not None:
            self._send(session.identity, reason)
        self._disconnect(session)
        self._timers.pop(session.number).cancel()
        del self._sessions[session.name]
        self._awake.pop(session, None)
        self._kept_bytes -= self._kept.pop(session, 0)
        session.close()
        self._check_settled()

    # ---- to clients --------------------------------------------------------------------------------------------------

    def _wake(self, session: Session) -> None:
        if not self._awake:
            self._loop.call_soon(self._flush)
        self._awake[session] = None

    def _flush(self) -> None:
        """What came together goes out together."""
        awake, self._awake = self._awake, {}
        for session in awake:
            if session.is_too_slow:
                logger.warning("a client of direct submission does not take its results, and is cut off")
                message = "results were not acknowledged: zmq.buffer_mb"
                self._end(session, Closed(code="too_slow", message=message))
                continue
            for outgoing in session.take():
                if session.identity is not None:
                    self._send_frames(session.identity, outgoing.frames)
            kept = session.num_bytes
            self._kept_bytes += kept - self._kept.get(session, 0)
            self._kept[session] = kept
        self._check_kept()
        self._check_settled()

    def _check_kept(self) -> None:
        """Where too much is kept for all clients together: who has most loses what was acknowledged, or is cut off."""
        if self._kept_bytes <= self._most_kept:
            return
        by_account: dict[str, int] = {}
        for session, num_bytes in self._kept.items():
            by_account[session.account.owner] = by_account.get(session.account.owner, 0) + num_bytes
        owner = max(by_account, key=by_account.__getitem__)
        most = max((each for each in self._kept if each.account.owner == owner), key=self._kept.__getitem__)
        if most.delivery.history_bytes:
            most.delivery.forget_all()
        else:
            most.is_too_slow = True
        self._wake(most)

    def _check_settled(self) -> None:
        if self._stopping and all(session.is_settled for session in self._sessions.values()):
            self._settled.set()

    def _send(self, identity: bytes, header: Header, columns: Columns | None = None) -> None:
        self._send_frames(identity, pack(header, columns))

    def _send_frames(self, identity: bytes, frames: list[Buffer]) -> None:
        """A connection that is gone, or takes nothing, is one no more: the client says hello on the next."""
        if not self._router.send([identity, *frames]):
            self._router.cut(identity)
            session = self._connected.get(identity)
            if session is not None:
                self._disconnect(session)
