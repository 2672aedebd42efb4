"""The records of files and batches, and how a batch goes from one status to the next.

Knows no storage and no HTTP.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Outcome = Literal["completed", "expired", "cancelled"]

FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})


def may_see(owner: str, viewer: str | None) -> bool:
    """Tells whether `viewer` may see what `owner` made. Everybody sees what has no owner; the viewer None sees all."""
    return viewer is None or owner in ("", viewer)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times are seconds since 1970. owner: see `may_see`."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    owner: str = ""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault in a batch's files. line: in the input file, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, except what changes with every line.

    endpoint: empty when each line names its own. output_id, error_id: chosen at the start; the files exist once
    something is written. total: lines, once they are counted. outcome: the end that was decided, while lines still run.
    owner: see `may_see`; the lines count in the owner's limits.
    """

    id: str
    endpoint: str
    input_file_id: str
    output_id: str
    error_id: str
    created_at: int
    completion_window: str = ""
    expires_at: int | None = None
    output_expires_after: int | None = None  # seconds from the files' creation
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    outcome: Outcome | None = None
    faults: tuple[Fault, ...] = ()
    total: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    owner: str = ""

    @property
    def forgotten_at(self) -> int | None:
        """Returns when the batch is forgotten: with its results, if these expire. None: never, or unknown so far."""
        ended = self.completed_at or self.failed_at or self.expired_at or self.cancelled_at
        return None if ended is None or self.output_expires_after is None else ended + self.output_expires_after

    def drop_metadata(self) -> BatchRecord:
        """Returns a copy without fields that may be large and are not needed to run the batch."""
        return msgspec.structs.replace(self, metadata=None)

    def accept(self, total: int, now: int) -> BatchRecord:
        """Starts the batch: its input file is valid."""
        assert self.status == "validating"
        return msgspec.structs.replace(self, status="in_progress", in_progress_at=now, total=total)

    def refuse(self, faults: tuple[Fault, ...], now: int) -> BatchRecord:
        """Fails the batch: a file is not valid, or no longer; no line runs any more."""
        return msgspec.structs.replace(self, status="failed", failed_at=now, faults=faults)

    def reopen(self) -> BatchRecord:
        """Reopens a batch that had ended, or whose end was decided."""
        assert self.in_progress_at is not None
        return msgspec.structs.replace(
            self, status="in_progress", outcome=None, faults=(), finalizing_at=None, completed_at=None
        )

    def begin_end(self, outcome: Outcome, now: int) -> BatchRecord:
        """Decides the end: no further line starts."""
        assert self.outcome is None, "the first outcome that is decided holds"
        if outcome == "cancelled":
            return msgspec.structs.replace(self, status="cancelling", cancelling_at=now, outcome=outcome)
        return msgspec.structs.replace(self, status="finalizing", finalizing_at=now, outcome=outcome)

    def end(self, now: int) -> BatchRecord:
        """Ends the batch: every line is in one of its files, and these can be read."""
        match self.outcome:
            case "completed":
                return msgspec.structs.replace(self, status="completed", completed_at=now)
            case "expired":
                return msgspec.structs.replace(self, status="expired", expired_at=now)
            case _:
                assert self.outcome == "cancelled"
                return msgspec.structs.replace(self, status="cancelled", cancelled_at=now)


class BatchProgress(msgspec.Struct, kw_only=True):
    """How much of a batch is done: lines by file, the files' lengths, tokens, and the done lines.

    is_broken: the database has lost it and only the lengths are known; such a progress is never written.
    """

    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    spans: bytes = b""
    is_broken: bool = False


class Batch(msgspec.Struct, frozen=True):
    """A batch at one moment."""

    record: BatchRecord
    progress: BatchProgress


class DoneLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that has ended. data: the line to write, JSON with its end. end: the byte after the input line."""

    line: int
    end: int
    failed: bool
    data: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def make_broken_batch(batch_id: str, input_file_id: str, owner: str) -> BatchRecord:
    message = "the server's database has lost what it knew of this batch; delete it, and make a new one of its input"
    return BatchRecord(
        id=batch_id,
        endpoint="",
        input_file_id=input_file_id,
        output_id="",
        error_id="",
        created_at=0,
        status="failed",
        faults=(Fault(code="record_damaged", message=message),),
        owner=owner,
    )
