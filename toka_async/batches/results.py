"""Writes lines of the output and error files in OpenAI's shape. Knows HTTP's status numbers, and no engine."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from toka_async.batches.lines import read_custom_id
from toka_async.batches.records import DoneLine, Outcome

UNDONE = {
    "cancelled": ("batch_cancelled", "This request could not be executed before the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
}


class LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a line. body: the JSON response of that HTTP status; empty where `error` says why there is none."""

    custom_id: str
    status: int = 0
    body: bytes = b""
    error: LineError | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


_ENCODER = msgspec.json.Encoder()


def cut_line(raw: bytes, outcome: Outcome) -> Answered:
    """Makes the result of a line in a batch that is cut short. Raises StorageError as `read_custom_id` does."""
    return Answered(read_custom_id(raw), error=LineError(*UNDONE[outcome]))


def encode_line(batch_id: str, number: int, end: int, answered: Answered) -> DoneLine:
    """Encodes the line. Its id has the number of the batch's line that it answers, from 0."""
    name = f"{batch_id.removeprefix('batch_')}_{number}"
    response = None
    if answered.body:
        response = LineResponse(answered.status, f"req_{name}", msgspec.Raw(answered.body))
    result = LineResult(f"batch_req_{name}", answered.custom_id, response, answered.error)
    return DoneLine(
        line=number,
        end=end,
        failed=answered.status != 200,
        data=_ENCODER.encode(result) + b"\n",
        input_tokens=answered.input_tokens,
        cached_tokens=answered.cached_tokens,
        output_tokens=answered.output_tokens,
    )
