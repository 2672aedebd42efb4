"""What is kept of files and batches, and how a batch goes from one status to the next.

Knows nothing of where it is kept, and nothing of HTTP.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Outcome = Literal["completed", "expired", "cancelled"]

FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})


def may_see(owner: str, viewer: str | None) -> bool:
    """Whether what `owner` made is there for `viewer`; without an owner it is everybody's. None: who sees all."""
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
    """What is wrong with a batch's files. line: of the input file, counted from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, but for what changes with every line.

    endpoint: empty, when each line says which. output_id, error_id: chosen at the start; there are such files when
    something was written. total: lines, once they were counted. outcome: decided, while it is brought about.
    owner: see `may_see`; whose limits its lines count in.
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
        """When the batch itself goes: with its results, if they have an end. None: not by itself, or not known yet."""
        ended = self.completed_at or self.failed_at or self.expired_at or self.cancelled_at
        return None if ended is None or self.output_expires_after is None else ended + self.output_expires_after

    def lean(self) -> BatchRecord:
        """Without what may be large and is not needed to work on it."""
        return msgspec.structs.replace(self, metadata=None)

    def accepted(self, total: int, now: int) -> BatchRecord:
        """The input file is in order."""
        assert self.status == "validating"
        return msgspec.structs.replace(self, status="in_progress", in_progress_at=now, total=total)

    def refused(self, faults: tuple[Fault, ...], now: int) -> BatchRecord:
        """A file is not in order, or not any more: nothing of it runs from now on."""
        return msgspec.structs.replace(self, status="failed", failed_at=now, faults=faults)

    def again(self) -> BatchRecord:
        """It goes on though it had ended, or its end was decided."""
        assert self.in_progress_at is not None
        return msgspec.structs.replace(
            self, status="in_progress", outcome=None, faults=(), finalizing_at=None, completed_at=None
        )

    def ending(self, outcome: Outcome, now: int) -> BatchRecord:
        """From now on no line is started."""
        assert self.outcome is None, "the first outcome that is decided holds"
        if outcome == "cancelled":
            return msgspec.structs.replace(self, status="cancelling", cancelling_at=now, outcome=outcome)
        return msgspec.structs.replace(self, status="finalizing", finalizing_at=now, outcome=outcome)

    def ended(self, now: int) -> BatchRecord:
        """Every line is in one of the files, and they are there to be read."""
        match self.outcome:
            case "completed":
                return msgspec.structs.replace(self, status="completed", completed_at=now)
            case "expired":
                return msgspec.structs.replace(self, status="expired", expired_at=now)
            case _:
                assert self.outcome == "cancelled"
                return msgspec.structs.replace(self, status="cancelled", cancelled_at=now)


class BatchProgress(msgspec.Struct, kw_only=True):
    """What is done of a batch: lines by where they went, the files' lengths, tokens, and which lines (`Spans`).

    is_broken: the database has lost it; nothing but the lengths is known. It is never written.
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
    """A batch as of now."""

    record: BatchRecord
    progress: BatchProgress


class DoneLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that has ended. data: what is written, a line of JSON with its end. end: byte after it in the input."""

    line: int
    end: int
    failed: bool
    data: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def broken_batch(batch_id: str, input_file_id: str, owner: str) -> BatchRecord:
    """What stands for a record that cannot be read any more."""
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
