"""Commands of trainers over direct submission: each is a method of `EngineControl`, with typed arguments.

Knows no sockets and no sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from toka_async.control import PauseMode, Source, Transfer
from toka_async.protocol import Command, CommandReply, EngineState
from toka_async.server.engine.control import ControlError, EngineControl
from toka_async.server.zmq.session import Session

logger = logging.getLogger(__name__)

MOST = 64  # commands at once, of all clients


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a command: a map in which what has a default may be absent."""


class PauseArguments(Arguments, frozen=True, kw_only=True):
    mode: PauseMode = "abort"


class AbortArguments(Arguments, frozen=True, kw_only=True):
    """ids: the client's own requests. names: as over HTTP. Neither: all requests of all clients."""

    ids: list[int] | None = None
    names: list[str] | None = None


class TransferArguments(Arguments, frozen=True, kw_only=True):
    transfer: Transfer
    timeout: Annotated[float, Meta(gt=0)] | None = None


class NameArguments(Arguments, frozen=True, kw_only=True):
    name: str


class BeginArguments(Arguments, frozen=True, kw_only=True):
    partial: bool = False


class LoadArguments(Arguments, frozen=True, kw_only=True):
    source: Source
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []


class FinishArguments(Arguments, frozen=True, kw_only=True):
    version: str | None = None


class VersionArguments(Arguments, frozen=True, kw_only=True):
    version: str


class SleepArguments(Arguments, frozen=True, kw_only=True):
    level: int = 1
    mode: PauseMode = "abort"


class Commands:
    """is_admin: whether the owner of a public key (empty without keys) may give commands."""

    def __init__(self, control: EngineControl, is_admin: Callable[[str], bool]) -> None:
        self._control = control
        self._is_admin = is_admin
        self._tasks: set[asyncio.Task[None]] = set()
        self._encode = msgspec.msgpack.Encoder().encode
        self._handlers: dict[str, tuple[type[Arguments], Callable[[Any, Session], Awaitable[object]]]] = {
            "state": (Arguments, self._state),
            "abort": (AbortArguments, self._abort),
            "pause": (PauseArguments, lambda args, _: control.pause(args.mode)),
            "resume": (Arguments, lambda _, __: control.resume()),
            "reset_prefix_cache": (Arguments, lambda _, __: control.reset_prefix_cache()),
            "open_transfer": (TransferArguments, lambda args, _: control.open_transfer(args.transfer, args.timeout)),
            "close_transfer": (NameArguments, lambda args, _: control.close_transfer(args.name)),
            "begin_update": (BeginArguments, lambda args, _: control.begin_update(args.partial)),
            "load": (LoadArguments, lambda args, _: control.load(args.source, args.names, args.dtypes, args.shapes)),
            "finish_update": (FinishArguments, lambda args, _: control.finish_update(args.version)),
            "abandon_update": (Arguments, lambda _, __: control.abandon_update()),
            "set_version": (VersionArguments, lambda args, _: control.set_version(args.version)),
            "checksum": (Arguments, lambda _, __: control.checksum()),
            "sleep": (SleepArguments, lambda args, _: control.sleep(args.level, args.mode)),
            "wake": (Arguments, lambda _, __: control.wake()),
        }

    def start(self, command: Command, session: Session, sender: str, answer: Callable[[CommandReply], object]) -> None:
        """Carries out a command, and answers once."""
        if not self._is_admin(sender):
            answer(CommandReply(id=command.id, error="this client's key is not in zmq.admins"))
            return
        if len(self._tasks) >= MOST:
            answer(CommandReply(id=command.id, error=f"{MOST} commands are under way"))
            return
        task = asyncio.create_task(self._run(command, session, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, command: Command, session: Session, answer: Callable[[CommandReply], object]) -> None:
        """A client that leaves meanwhile changes nothing: a command is carried out to its end."""
        try:
            result = await self._handle(command, session)
        except ControlError as error:
            answer(CommandReply(id=command.id, error=str(error)))
        except Exception:
            logger.exception("a command failed")
            answer(CommandReply(id=command.id, error="internal error"))
        else:
            answer(CommandReply(id=command.id, result=Raw(self._encode(result))))

    async def _handle(self, command: Command, session: Session) -> object:
        kind, handle = self._handlers.get(command.name, (None, None))
        if kind is None or handle is None:
            raise ControlError(f"there is no command {command.name!r}; there are: {', '.join(self._handlers)}")
        try:
            args = msgspec.msgpack.decode(command.args, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ControlError(f"{command.name}: {error}") from None
        return await handle(args, session)

    async def _abort(self, args: AbortArguments, session: Session) -> int:
        if args.ids is None:
            return await self._control.abort(args.names)
        names = [*(args.names or ()), *(session.name_request(key) for key in args.ids)]
        return await self._control.abort(names, [(session, key) for key in args.ids])

    async def _state(self, _: Arguments, __: Session) -> EngineState:
        control = self._control
        return EngineState(
            is_paused=control.is_paused,
            is_updating=control.is_updating,
            is_asleep=control.is_asleep,
            is_torn=control.is_torn,
            weight_version=control.weight_version,
            world_size=control.world_size,
        )
