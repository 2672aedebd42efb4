"""The routes of batches."""

from __future__ import annotations

import re
import secrets
from functools import partial
from typing import Any

from aiohttp import web

from toka_async.batches.disk import StorageError
from toka_async.batches.quota import QuotaError
from toka_async.batches.records import FINAL, Batch, BatchRecord
from toka_async.batches.store import InUseError, NotFoundError
from toka_async.openai.batches import (
    MAX_KEY,
    MAX_PAIRS,
    MAX_VALUE,
    WINDOW,
    BatchDeleted,
    BatchError,
    BatchErrors,
    BatchList,
    BatchObject,
    BatchUsage,
    CreateBatch,
    InputDetails,
    RequestCounts,
)
from toka_async.openai.errors import ApiError, bad_request
from toka_async.server.access.guard import viewer_of
from toka_async.server.batch.batch_service import BatchService
from toka_async.server.http.files import PURPOSE, ask_store, batch_service, over_quota, storage_failed
from toka_async.server.http.query import Query
from toka_async.server.http.receive import read_request
from toka_async.server.http.respond import json_response

PAGE, MAX_PAGE = 20, 100
LIST_QUERY: dict[str, dict[str, Any]] = {  # parameters of a list -> schemas
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE},
}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_DAYS = 365


async def create_batch(request: web.Request) -> web.Response:
    service = batch_service(request)
    wire = await read_request(request, CreateBatch)
    check_metadata(wire.metadata or {})
    lasts, now = parse_window(wire.completion_window), int(service.store.now())
    viewer = viewer_of(request)
    await check_input(service, wire.input_file_id, viewer)
    name = secrets.token_hex(12)
    record = BatchRecord(
        id=f"batch_{name}",
        endpoint=wire.endpoint,
        input_file_id=wire.input_file_id,
        output_id=f"file-{secrets.token_hex(12)}",
        error_id=f"file-{secrets.token_hex(12)}",
        created_at=now,
        completion_window=wire.completion_window,
        expires_at=now + lasts,
        output_expires_after=None if wire.output_expires_after is None else wire.output_expires_after.seconds,
        metadata=wire.metadata,
        owner=viewer or "",
    )
    try:
        return json_response(batch_object(service, await service.batches.create(record, service.quota)))
    except NotFoundError:
        raise no_input(wire.input_file_id) from None
    except QuotaError as error:
        raise over_quota(error) from None
    except StorageError as error:
        raise storage_failed(error) from error


async def check_input(service: BatchService, file_id: str, viewer: str | None) -> None:
    """Raises ApiError (400) unless it is a file that the viewer can make a batch of."""
    try:
        record = await ask_store(service, partial(service.store.file, file_id, viewer), "file", file_id)
    except ApiError as error:
        raise no_input(file_id) if error.status == 404 else error from None
    if record.purpose != PURPOSE:
        raise bad_request(
            f"'input_file_id': the file's purpose is {record.purpose}, not {PURPOSE}", param="input_file_id"
        )


def no_input(file_id: str) -> ApiError:
    return bad_request(f"'input_file_id': there is no file {file_id[:64]!r}", param="input_file_id", code="not_found")


def parse_window(window: str) -> int:
    """Parses text like 24h. Raises ApiError (400)."""
    match = re.fullmatch(WINDOW, window)
    seconds = int(window[:-1]) * UNITS[window[-1]] if match else 0
    if not 0 < seconds <= LONGEST_DAYS * UNITS["d"]:
        raise bad_request(
            f"'completion_window' must be a number with s, m, h or d, such as 24h, up to {LONGEST_DAYS}d; "
            f"got {window[:64]!r}",
            param="completion_window",
        )
    return seconds


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises ApiError (400)."""
    if len(metadata) > MAX_PAIRS:
        raise bad_request(f"'metadata' can have at most {MAX_PAIRS} pairs, got {len(metadata)}", param="metadata")
    if any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in metadata.items()):
        raise bad_request(f"'metadata' keys have at most {MAX_KEY} characters and values {MAX_VALUE}", param="metadata")


async def list_batches(request: web.Request) -> web.Response:
    service, query = batch_service(request), Query(request, LIST_QUERY)
    limit, after = query.number("limit", PAGE, MAX_PAGE), query.text("after")
    found = await ask_store(
        service, partial(service.store.batches, after, limit + 1, viewer_of(request)), "batch", after
    )
    data = [batch_object(service, batch) for batch in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(BatchList(data=data, first_id=first, last_id=last, has_more=len(found) > limit))


async def get_batch(request: web.Request) -> web.Response:
    service, batch_id = batch_service(request), request.match_info["batch"]
    batch = await ask_store(service, partial(service.store.batch, batch_id, viewer_of(request)), "batch", batch_id)
    return json_response(batch_object(service, batch))


async def cancel_batch(request: web.Request) -> web.Response:
    service, batch_id = batch_service(request), request.match_info["batch"]
    try:
        batch = await service.batches.cancel(batch_id, viewer_of(request))
    except NotFoundError:
        raise ApiError(404, f"there is no batch {batch_id[:64]!r}", param="id", code="not_found") from None
    except StorageError as error:
        raise storage_failed(error) from error
    if batch.record.status in FINAL - {"cancelled"} or batch.record.outcome != "cancelled":
        raise bad_request(f"a batch that is {batch.record.status} cannot be cancelled", code="batch_ended")
    return json_response(batch_object(service, batch))


async def delete_batch(request: web.Request) -> web.Response:
    """OpenAI has no such route. Nobody else removes ended batches here, and thousands of them are useless."""
    service, batch_id = batch_service(request), request.match_info["batch"]
    try:
        remove = partial(service.store.remove_batch, batch_id, viewer_of(request))
        await ask_store(service, remove, "batch", batch_id, service.batches.insist)
    except InUseError:
        raise ApiError(409, "the batch has not ended; cancel it first", code="batch_not_ended") from None
    return json_response(BatchDeleted(id=batch_id))


def batch_object(service: BatchService, batch: Batch) -> BatchObject:
    """Returns the API's form of a batch. While the disk takes no results, `errors` says so."""
    record, progress = batch.record, batch.progress
    has_ended, trouble = record.status in FINAL, service.batches.ledger.trouble
    errors = [
        BatchError(code=fault.code, message=fault.message, param=fault.param, line=fault.line)
        for fault in record.faults
    ]
    if trouble is not None and not has_ended:
        code = "disk_full" if trouble.full else "storage_failed"
        errors.append(BatchError(code=code, message="the batch waits until the server's disk takes results again"))
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        model=service.service.name,
        errors=BatchErrors(data=errors) if errors else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=record.output_id if has_ended and progress.output_bytes else None,
        error_file_id=record.error_id if has_ended and progress.error_bytes else None,
        created_at=record.created_at,
        in_progress_at=record.in_progress_at,
        expires_at=record.expires_at,
        finalizing_at=record.finalizing_at,
        completed_at=record.completed_at,
        failed_at=record.failed_at,
        expired_at=record.expired_at,
        cancelling_at=record.cancelling_at,
        cancelled_at=record.cancelled_at,
        request_counts=RequestCounts(total=record.total, completed=progress.completed, failed=progress.failed),
        usage=BatchUsage(
            input_tokens=progress.input_tokens,
            input_tokens_details=InputDetails(progress.cached_tokens),
            output_tokens=progress.output_tokens,
            total_tokens=progress.input_tokens + progress.output_tokens,
        ),
        metadata=record.metadata,
    )
