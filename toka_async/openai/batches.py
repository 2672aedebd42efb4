"""OpenAI's requests and responses for files and batches. Knows shapes only."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from toka_async.openai.requests import WireRequest

Endpoint = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"]
# The states of `toka_async.batches`.
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Lifetime = Annotated[int, Meta(ge=3600, le=2_592_000)]  # seconds
WINDOW = "^[1-9][0-9]{0,8}[smhd]$"
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # limits of metadata
METADATA = {
    "maxProperties": MAX_PAIRS,
    "propertyNames": {"maxLength": MAX_KEY},
    "additionalProperties": {"maxLength": MAX_VALUE},
}


class ExpiresAfter(WireRequest, frozen=True, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Lifetime


class CreateBatch(WireRequest, frozen=True, kw_only=True):
    """POST /v1/batches. `parse_window` parses `completion_window`."""

    input_file_id: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(extra_json_schema={"pattern": WINDOW, "examples": ["24h"]})]
    metadata: Annotated[dict[str, str], Meta(extra_json_schema=METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = None


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    deleted: bool = True


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
