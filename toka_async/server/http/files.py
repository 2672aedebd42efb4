"""The routes of files. An upload goes to the disk as it arrives. No name of a request becomes a path."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from toka_async.batches.disk import Disk, StorageError, storage_errors
from toka_async.batches.quota import Quota, QuotaError
from toka_async.batches.records import FileRecord
from toka_async.batches.store import InUseError, NotFoundError
from toka_async.openai.batches import ExpiresAfter, FileDeleted, FileList, FileObject
from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.schemas import build_components
from toka_async.server.access.guard import viewer_of
from toka_async.server.batch.batch_service import BatchService
from toka_async.server.http.body_deadline import BodyDeadline
from toka_async.server.http.query import Query, clean_name
from toka_async.server.http.receive import check_encoding, reserve
from toka_async.server.http.respond import json_response
from toka_async.server.http.unsent import FileDownload

BATCHES: web.AppKey[BatchService | None] = web.AppKey("batches")
PURPOSE = "batch"
MAX_FIELD = 4096  # bytes in a form field
CHUNK = 1 << 20  # bytes of one write of an upload
OVERHEAD = 1 << 16  # bytes of a form around its file
PAGE = 10_000

LIMIT = {"type": "integer", "minimum": 1, "maximum": PAGE, "default": PAGE}
ORDERS: tuple[Literal["asc", "desc"], ...] = ("asc", "desc")
ORDER = {"enum": list(ORDERS), "default": "desc"}
LIST_QUERY: dict[str, dict[str, Any]] = {  # parameters of a list of files -> schemas
    "after": {"type": "string"},
    "limit": LIMIT,
    "order": ORDER,
    "purpose": {"type": "string"},
}
LASTS = build_components([ExpiresAfter])["ExpiresAfter"]
FORM: dict[str, Any] = {  # the schema of the form of an upload
    "type": "object",
    "properties": {
        "file": {"contentMediaType": "application/octet-stream"},
        "purpose": {"const": PURPOSE},
        **{
            f"expires_after[{name}]": schema
            for name, schema in build_components([ExpiresAfter])["ExpiresAfter"]["properties"].items()
        },
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}

T = TypeVar("T")


def batch_service(request: web.Request) -> BatchService:
    """Raises ApiError (404) when the server keeps no files."""
    service = request.app[BATCHES]
    if service is None:
        raise ApiError(
            404,
            "this server keeps no files and batches: start it with server.data_dir=FOLDER, where it can keep them",
            code="no_data_dir",
        )
    return service


async def create_file(request: web.Request) -> web.Response:
    service = batch_service(request)
    check_upload(request)
    await reserve(request, CHUNK if request.content_length is None else min(CHUNK, request.content_length))
    upload = await make_upload(service, viewer_of(request) or "", request.content_length or 0)
    try:
        await receive(request, upload, service.executor)
        record = upload.record(int(service.store.now()))
        try:
            await service.writer.run(partial(service.store.add_file, record, upload.path, service.quota))
        except StorageError:
            service.store.path(record.id).unlink(missing_ok=True)
            raise
    except StorageError as error:
        raise storage_failed(error) from error
    except QuotaError as error:
        raise over_quota(error) from None
    finally:
        upload.receiving.subtract({upload.owner: upload.num_bytes})
        upload.path.unlink(missing_ok=True)
    return json_response(file_object(record))


async def make_upload(service: BatchService, owner: str, num_bytes: int) -> Upload:
    """Starts an upload of about `num_bytes`. Raises ApiError (429) when its owner is at a limit."""
    num_files, num_kept = await service.writer.run(partial(service.store.database.count_files, owner))
    num_coming = service.receiving[owner] + max(0, num_bytes - OVERHEAD)
    try:
        service.quota.check_files(num_files + 1, num_kept + num_coming)
    except QuotaError as error:
        raise over_quota(error) from None
    return Upload(
        path=service.store.folder.make_upload(),
        owner=owner,
        max_bytes=service.config.max_file_mb << 20,
        quota=service.quota,
        num_kept=num_kept,
        receiving=service.receiving,
        deadline=BodyDeadline(service.service.config.receive_timeout),
    )


def check_upload(request: web.Request) -> None:
    """Raises ApiError for a request whose headers show a too large (413), compressed or wrong form (415)."""
    check_encoding(request)
    if request.content_type != "multipart/form-data":
        raise ApiError(415, f"the body must be multipart/form-data, not {request.content_type[:64]}")
    max_file_mb = batch_service(request).config.max_file_mb
    if (request.content_length or 0) > (max_file_mb << 20) + OVERHEAD:
        raise too_large(max_file_mb)


def too_large(max_file_mb: int) -> ApiError:
    return ApiError(413, f"the file is larger than batches.max_file_mb ({max_file_mb} MiB)", param="file")


@dataclass(slots=True)
class Upload:
    """A form that is being received. filename: None until the file has come.

    max_bytes: limit of the file. num_kept: bytes of its owner's files. receiving: bytes of all uploads, by owner.
    """

    path: Path
    owner: str
    max_bytes: int
    quota: Quota
    num_kept: int
    receiving: Counter[str]
    deadline: BodyDeadline
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Counts further bytes of the file. Raises ApiError (413) or QuotaError when there is no room for them."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise too_large(self.max_bytes >> 20)
        self.quota.check_files(0, self.num_kept + self.receiving[self.owner] + num_bytes)
        self.num_bytes += num_bytes
        self.receiving[self.owner] += num_bytes

    def record(self, now: int) -> FileRecord:
        """Makes the file's record. Raises ApiError (400) when something is missing or wrong."""
        if self.filename is None:
            raise bad_request("'file' is required", param="file")
        purpose = self.fields.pop("purpose", None)
        if purpose != PURPOSE:
            raise bad_request(f"'purpose' must be {PURPOSE!r}, got {purpose!r}", param="purpose")
        lasts = parse_expires_after(
            {name: self.fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds")}
        )
        return FileRecord(
            id=f"file-{secrets.token_hex(12)}",
            filename=self.filename,
            purpose=purpose,
            bytes=self.num_bytes,
            created_at=now,
            expires_at=None if lasts is None else now + lasts,
            owner=self.owner,
        )


def parse_expires_after(fields: dict[str, str | None]) -> int | None:
    """Returns seconds. Raises ApiError (400)."""
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        return None
    try:
        return msgspec.convert(given, ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise bad_request(f"'expires_after': {error}", param="expires_after") from None


async def receive(request: web.Request, upload: Upload, executor: Executor) -> None:
    """Reads the form. Raises ApiError (400, 408, 413) or StorageError."""
    deadline = upload.deadline
    async with deadline.limit_wait():
        with form_errors():
            reader = await request.multipart()
    while True:
        async with deadline.limit_wait():
            with form_errors():
                part = await reader.next()
                given = part.name if isinstance(part, BodyPartReader) else None
        if part is None:
            return
        if not isinstance(part, BodyPartReader) or given is None:
            raise bad_request("a part of the form has no name")
        name = clean_name(given)
        if part.headers.get("Content-Transfer-Encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
            raise bad_request(f"'{name[:64]}' must not be encoded for transfer", param=name[:64])
        if name == "file":
            await receive_file(part, upload, executor)
        elif name in upload.fields:
            raise bad_request(f"there is more than one '{name}'", param=name)
        elif name not in FORM["properties"]:
            raise bad_request(f"'{name}' is not supported", param=name)
        else:
            upload.fields[name] = await read_field(part, name, deadline)


@contextmanager
def form_errors() -> Iterator[None]:
    """Turns any error of the framework's form parser, which has no class for bad forms, into ApiError (400).

    Only calls of the parser belong inside. A body that does not come, or a client that is gone, is no bad form.
    """
    try:
        yield
    except (web.RequestPayloadError, ConnectionError):
        raise
    except HttpProcessingError:  # the message would quote all that was sent
        raise bad_request(
            "the form cannot be read: a part has a header that is none, or one that is too long"
        ) from None
    except Exception as error:
        raise bad_request(f"the form cannot be read: {clean_name(str(error))}") from None


async def read_field(part: BodyPartReader, name: str, deadline: BodyDeadline) -> str:
    data = b""
    while chunk := await read_chunk(part, MAX_FIELD, deadline):
        data += chunk
        if len(data) > MAX_FIELD:
            raise bad_request(f"'{name}' is too long", param=name)
    return data.decode("utf-8", "replace")


async def read_chunk(part: BodyPartReader, most: int, deadline: BodyDeadline) -> bytes:
    """Returns no bytes at the end. Raises ApiError (400, 408)."""
    async with deadline.limit_wait():
        with form_errors():
            chunk = await part.read_chunk(most)
    deadline.num_bytes += len(chunk)
    return chunk


async def receive_file(part: BodyPartReader, upload: Upload, executor: Executor) -> None:
    """Writes the file to the disk, in pieces, and syncs it."""
    if upload.filename is not None:
        raise bad_request("there is more than one 'file'", param="file")
    with form_errors():
        upload.filename = clean_name(part.filename or "file")
    disk, written = Disk(), 0
    with storage_errors(upload.path):
        fd = os.open(upload.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        held = bytearray()
        while chunk := await read_chunk(part, CHUNK, upload.deadline):
            upload.add(len(chunk))
            held += chunk
            if len(held) >= CHUNK:
                await in_thread(executor, write, disk, upload.path, fd, held, written)
                written += len(held)
                held.clear()
        await in_thread(executor, write, disk, upload.path, fd, held, written)
    finally:
        os.close(fd)
    await in_thread(executor, disk.sync, upload.path)


def write(disk: Disk, path: Path, fd: int, data: bytearray, offset: int) -> None:
    with storage_errors(path):
        disk.write(fd, data, offset)


async def in_thread(executor: Executor, work: Callable[..., T], *values: Any) -> T:
    """Runs `work` to its end before returning, even if the client leaves."""
    future = asyncio.get_running_loop().run_in_executor(executor, partial(work, *values))
    try:
        return await asyncio.shield(future)
    finally:
        await asyncio.wait([future])


# ---- existing files ------------------------------------------------------------------------------------------------


async def list_files(request: web.Request) -> web.Response:
    service, query = batch_service(request), Query(request, LIST_QUERY)
    limit, order, after = query.number("limit", PAGE, PAGE), query.choice("order", ORDERS, "desc"), query.text("after")
    find = partial(service.store.files, query.text("purpose"), after, order, limit + 1, viewer_of(request))
    found = await ask_store(service, find, "file", after)
    data = [file_object(record) for record in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(FileList(data=data, first_id=first, last_id=last, has_more=len(found) > limit))


async def get_file(request: web.Request) -> web.Response:
    return json_response(file_object(await find_file(request)))


async def get_content(request: web.Request) -> web.StreamResponse:
    record, service = await find_file(request), batch_service(request)
    path = service.store.path(record.id)
    if not path.is_file():
        await find_file(request)  # raises 404 if the file was deleted meanwhile
        raise ApiError(500, f"the content of {record.id} is lost: its file is gone from the disk")
    headers = {"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"}
    return FileDownload(path, headers)


async def delete_file(request: web.Request) -> web.Response:
    service, file_id = batch_service(request), request.match_info["file"]
    try:
        remove = partial(service.store.remove_file, file_id, viewer_of(request))
        await ask_store(service, remove, "file", file_id, service.batches.insist)
    except InUseError as error:
        message = f"the file is the input of {error}, which has not ended; cancel that, or delete it if it has failed"
        raise ApiError(409, message, code="file_in_use") from None
    return json_response(FileDeleted(id=file_id))


async def find_file(request: web.Request) -> FileRecord:
    service, file_id = batch_service(request), request.match_info["file"]
    return await ask_store(service, partial(service.store.file, file_id, viewer_of(request)), "file", file_id)


async def ask_store(
    service: BatchService,
    work: Callable[[], T],
    what: str,
    name: str | None,
    run: Callable[[Callable[[], T]], Awaitable[T]] | None = None,
) -> T:
    """Runs `work` on the store. Raises ApiError without such a thing (404), or when the disk does not work.

    run: runs `work`; None: the writer does.
    """
    try:
        return await (run or service.writer.run)(work)
    except NotFoundError:
        raise ApiError(404, f"there is no {what} {clean_name(name or '')!r}", param="id", code="not_found") from None
    except StorageError as error:
        raise storage_failed(error) from error


def storage_failed(error: StorageError) -> ApiError:
    if error.full:
        return ApiError(507, "the server's disk is full; nothing was kept", code="disk_full")
    return ApiError(500, "the server's disk does not work; nothing was kept", code="storage_failed")


def over_quota(error: QuotaError) -> ApiError:
    return ApiError(429, str(error), code="insufficient_quota")


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )
