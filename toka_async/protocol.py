"""The public protocol of direct submission over ZeroMQ: headers, columns, and how they become frames.

A message to the server is several frames: the header (a msgpack map with its `type`), then one frame for each column
that the header names: raw little-endian numbers, one after the other. A message to a client is one frame: the header,
with the columns' bytes in its `data`. client/PROTOCOL.md is the reference for clients in other languages. Knows no
sockets and no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, Raw, UnsetType
from msgspec.structs import replace

from toka_async.control import DEFAULT_VERSION

VERSIONS = (4,)  # in version 3, results had no versions of the weights, no kept tokens, and no reason 4

Column = npt.NDArray[Any]
Columns = dict[str, Column]
Buffer = bytes | memoryview

DTYPES: dict[str, str] = {
    "ids": "<i8",  # of requests, chosen by the client, 0 or more
    "lengths": "<i4",  # of prompts, in tokens or bytes
    "prompts": "<i4",  # token ids
    "texts": "u1",  # UTF-8
    "seeds": "<i8",
    "samples": "<i4",
    "counts": "<i4",  # of tokens
    "reasons": "<i4",  # messages.Reason
    "cached": "<i4",  # prompt tokens found in the cache
    "token_ids": "<i4",
    "logprobs": "<f4",
    "top_ids": "<i4",
    "top_logprobs": "<f4",
    "kept": "<i4",  # tokens that the filters kept
    "masses": "<f4",  # the share of the distribution that these have
    "span_counts": "<i4",  # of spans in a row
    "span_ends": "<i4",  # tokens of the row up to the end of the span
    "span_versions": "<i4",  # index of the span's version
    "ranks": "<i4",  # of a prompt's tokens among all, from 1
    "text_lengths": "<i4",  # bytes
    "stops": "<i4",  # index of the request's stop string that was found, or -1
}

Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class ProtocolError(ValueError):
    """A message that does not follow this protocol. field: of the header, or the column, at fault, if known."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """The contents of a message. columns: their names, in order."""

    columns: Annotated[tuple[str, ...], Meta(max_length=len(DTYPES))] = ()


# ---- client -> server ------------------------------------------------------------------------------------------------


class Hello(Header, frozen=True, kw_only=True, tag="hello"):
    """The first message on every connection.

    session: an unguessable name, the same after a broken connection, so that the server finds the session. received:
    the `seq` of the last message that was handled; later messages are sent again.
    """

    versions: Annotated[tuple[int, ...], Meta(min_length=1, max_length=64)]
    session: Annotated[bytes, Meta(min_length=16, max_length=64)]
    received: Count = 0


class Submission(Header, frozen=True, kw_only=True, tag="submit"):
    """Requests that differ in their prompts and seeds only.

    Columns: ids [r], lengths [r], prompts or texts [sum(lengths)], and optionally seeds [r]. fields: a map with the
    fields of /v1/completions that control generation.
    """

    fields: Raw = Raw(b"\x80")
    ack: Count = 0


class Cancellation(Header, frozen=True, kw_only=True, tag="cancel"):
    """Columns: ids [r]. Each ends with an error of code `cancelled`, unless it has ended already."""


class Ack(Header, frozen=True, kw_only=True, tag="ack"):
    """All messages up to this `seq` were handled: the server forgets them and returns their requests' credit."""

    ack: Count


class Ping(Header, frozen=True, kw_only=True, tag="ping"):
    """A sign of life, answered with a Pong."""


class Command(Header, frozen=True, kw_only=True, tag="command"):
    """Control of the engine by a trainer, answered with a CommandReply. id: the client's. See client/PROTOCOL.md."""

    id: Id
    name: Annotated[str, Meta(max_length=64)]
    args: Raw = Raw(b"\x80")


class Bye(Header, frozen=True, kw_only=True, tag="bye"):
    """The session is over: running requests are cancelled."""


FromClient = Hello | Submission | Cancellation | Ack | Ping | Command | Bye


# ---- server -> client ------------------------------------------------------------------------------------------------


class ServerHeader(Header, frozen=True, kw_only=True):
    """A message to a client. data: the bytes of the columns, in order, present on the wire only.

    It is absent without columns, so clients of every version can read `closed`, which tells them that theirs is wrong.
    """

    data: Annotated[tuple[memoryview, ...], Meta(max_length=len(DTYPES))] | UnsetType = UNSET


class Welcome(ServerHeader, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a Hello.

    resumed: the session was known, with all of its requests. credit: requests that may be open at once; one is open
    from its submission until the message that ended it was acknowledged. window: messages that the server sends ahead
    of the last acknowledged one. heartbeat: most seconds between two messages of a client. max_seqs: samples that run
    at once. model, vocab_size, max_context, max_n: limits of requests; max_message: bytes of a frame.
    """

    version: int
    resumed: bool
    credit: Count
    window: Count
    heartbeat: Annotated[float, Meta(gt=0, le=86400)]
    max_seqs: Count
    model: str
    vocab_size: Count
    max_context: Count
    max_n: Count
    max_message: Count


class Results(ServerHeader, frozen=True, kw_only=True, tag="results"):
    """Tokens of samples, one row each.

    Columns: ids, samples, counts, reasons, cached [r], token_ids [t], t = sum(counts); if asked for: logprobs [t],
    top_ids and top_logprobs [t, num_top], kept and masses [t], text_lengths [r] and texts, stops [r]. A request has
    ended when each of its samples has had a row with a reason.

    versions: of the weights. The first one generated all tokens, unless there are span_counts [r], and span_ends and
    span_versions [sum(span_counts)], which say it of every token.
    """

    seq: Count
    num_top: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    versions: Annotated[tuple[str, ...], Meta(min_length=1)] = (DEFAULT_VERSION,)


class PromptLogprobs(ServerHeader, frozen=True, kw_only=True, tag="prompt"):
    """The answer to `prompt_logprobs` of one request, before its results: entry i belongs to prompt token i + 1.

    Columns: logprobs and ranks [p - 1], top_ids and top_logprobs [p - 1, num_top].
    """

    seq: Count
    id: Id
    num_top: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Error(ServerHeader, frozen=True, kw_only=True, tag="error"):
    """The requests in the column `ids` ended without (further) results; without the column, a message was wrong and seq
    is 0.

    status, code, param, message: as in HTTP's errors.
    """

    seq: Count = 0
    status: int
    code: str | None = None
    param: str | None = None
    message: str
    retry_after: Seconds | None = None


class Pong(ServerHeader, frozen=True, kw_only=True, tag="pong"):
    """The answer to a Ping."""


class CommandReply(ServerHeader, frozen=True, kw_only=True, tag="reply"):
    """The answer to a Command, sent once, over the connection that it came by. error: why it was refused or failed."""

    id: Id
    error: str | None = None
    result: Raw = Raw(b"\xc0")


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the command `state`.

    is_torn: an update has failed and left weights of two versions. world_size: ranks of all replicas.
    """

    is_paused: bool
    is_updating: bool
    is_asleep: bool
    is_torn: bool
    weight_version: str
    world_size: int


class Closed(ServerHeader, frozen=True, kw_only=True, tag="closed"):
    """The connection has no session (any more); code: `unknown`, `too_slow`, `stopping`, `refused`.

    Another Hello begins a new session; after `refused` it would be refused again.
    """

    code: str
    message: str


FromServer = Welcome | Results | PromptLogprobs | Error | Pong | CommandReply | Closed

H = TypeVar("H", bound=Header)


# ---- frames ----------------------------------------------------------------------------------------------------------

_KINDS = {name: np.dtype(kind) for name, kind in DTYPES.items()}
_ENCODER = msgspec.msgpack.Encoder()
_FROM_CLIENT: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_FROM_SERVER: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def pack(header: Header, columns: Mapping[str, Column] | None = None) -> list[Buffer]:
    """Encode a message as frames. Contiguous columns of a message to the server are not copied."""
    columns = columns or {}
    assert header.columns == tuple(columns)
    parts = map(_encode_column, columns.items())
    if isinstance(header, ServerHeader):
        return [_ENCODER.encode(replace(header, data=tuple(parts)) if columns else header)]
    return [_ENCODER.encode(header), *parts]


def seal(header: ServerHeader, columns: Columns) -> tuple[list[Buffer], Columns]:
    """Encode a message to a client; returns its frame, and the columns as views of it, which saves memory."""
    frames = pack(header, columns)
    return frames, _decode_columns(header, _get_data(_decode(_FROM_SERVER, frames[0])), "columns have data")


def from_client(frames: Sequence[Buffer]) -> tuple[FromClient, Columns]:
    """Decode a client's message; its columns are views of the frames. Raises ProtocolError."""
    if not frames:
        raise ProtocolError("a message without frames")
    header = _decode(_FROM_CLIENT, frames[0])
    return header, _decode_columns(header, frames[1:], "frames follow")


def from_server(frames: Sequence[Buffer]) -> tuple[FromServer, Columns]:
    """Decode a server's message; its columns are copies, since they may lie unaligned. Raises ProtocolError."""
    if len(frames) != 1:
        raise ProtocolError(f"a message of {len(frames)} frames, not of one")
    header = _decode(_FROM_SERVER, frames[0])
    columns = _decode_columns(header, _get_data(header), "columns have data")
    copies = {name: values.copy() for name, values in columns.items()}
    return header if header.data is UNSET else replace(header, data=UNSET), copies


def _get_data(header: ServerHeader) -> tuple[memoryview, ...]:
    return () if header.data is UNSET else header.data


def _encode_column(named: tuple[str, Column]) -> memoryview:
    name, values = named
    return np.ascontiguousarray(values, _KINDS[name]).reshape(-1).view(np.uint8).data


def _decode(decoder: msgspec.msgpack.Decoder[H], frame: Buffer) -> H:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what, _, path = str(error).partition(" - at `$")
        raise ProtocolError(f"the header cannot be read: {what}", path.strip("`.") or None) from None


def _decode_columns(header: Header, parts: Sequence[Buffer], what: str) -> Columns:
    names = header.columns
    if len(names) != len(parts) or len(set(names)) != len(names):
        raise ProtocolError(f"{len(parts)} {what}, {len(names)} columns are named", "columns")
    return {name: _decode_column(name, part) for name, part in zip(names, parts, strict=True)}


def _decode_column(name: str, frame: Buffer) -> Column:
    kind = _KINDS.get(name)
    if kind is None:
        raise ProtocolError(f"there is no column {name[:64]!r}", "columns")
    if len(frame) % kind.itemsize:
        raise ProtocolError(f"{len(frame)} bytes are no whole number of {kind.itemsize}-byte values", name)
    return np.frombuffer(frame, kind)
