"""Reads the lines of an input file in pieces, and checks the file before its first line runs.

Skips blank lines, and a byte order mark at the start. Checks what every line must have to be answered at all; what a
line asks for is checked when it runs.
"""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from toka_async.batches.disk import StorageError, storage_errors
from toka_async.batches.records import Fault

MAX_FAULTS = 20  # reported for a file
MAX_ID = 512  # characters in a custom_id
MAX_BLANK = 1000  # blank lines, plus one for each allowed line
BLOCK = 1 << 20  # bytes of one read


class LineId(msgspec.Struct, frozen=True):
    custom_id: str


class Asked(msgspec.Struct, frozen=True):
    model: str | None = None


class LineModel(msgspec.Struct, frozen=True):
    body: Asked


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line as in the file. end: the byte after it."""

    raw: bytes
    end: int


_LINE_ID = msgspec.json.Decoder(LineId)
_LINE_MODEL = msgspec.json.Decoder(LineModel)


def read_custom_id(raw: bytes) -> str:
    """Reads the custom_id of a checked line. Raises StorageError when the line has changed."""
    try:
        return _LINE_ID.decode(raw).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise StorageError("the input file is not what it was when it was checked") from None


def read_lines(path: Path, offset: int, max_lines: int, max_bytes: int) -> list[RawLine]:
    """Reads the lines that start within `max_bytes` from byte `offset` on; at least one, unless none is left.

    Raises StorageError when the file cannot be read.
    """
    lines: list[RawLine] = []
    with storage_errors(path), path.open("rb", buffering=BLOCK // 4) as file:
        file.seek(offset)
        start = offset
        while len(lines) < max_lines and (not lines or start - offset < max_bytes) and (raw := file.readline()):
            first, start = not start, start + len(raw)
            if raw := strip_line(raw, first):
                lines.append(RawLine(raw, start))
    return lines


def strip_line(raw: bytes, first: bool) -> bytes:
    """Removes blanks, and the byte order mark that Windows may put before the `first` line of a file."""
    return (raw.removeprefix(BOM_UTF8) if first else raw).strip()


@dataclass(slots=True)
class Checker:
    """Checks a file once, piece by piece: it must have lines, not too many or too long ones, each a JSON object.

    Each needs a unique `custom_id`, which identifies its line in the results. total: lines so far. done: the check has
    ended. faults: what is wrong with the file. model: the only one that lines may name; empty: any, because a line that
    asks for another gets an error as its answer.
    """

    path: Path
    max_lines: int
    max_line_bytes: int
    model: str = ""
    total: int = 0
    done: bool = False
    faults: list[Fault] = field(default_factory=list)
    _offset: int = 0
    _number: int = 0  # lines read, with blank ones
    _rest: bytes = b""
    _ids: array[int] = field(default_factory=lambda: array("q"))  # 64-bit hashes of ids, with a random key
    _numbers: array[int] = field(default_factory=lambda: array("i"))  # line numbers of `_ids`

    def step(self) -> None:
        """Checks the next piece. Raises StorageError."""
        with storage_errors(self.path), self.path.open("rb") as file:
            file.seek(self._offset)
            block = file.read(BLOCK)
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if not block:
            lines, self._rest = [self._rest], b""
        for raw in lines:
            self._number += 1
            if raw and (raw := strip_line(raw, self._number == 1)):
                self._check(raw)
        if self._number > 2 * self.max_lines + MAX_BLANK:
            self._fault("too_many_lines", f"the input file has more than {self._number - 1} lines, blank ones counted")
        if len(self._rest) > self.max_line_bytes:
            self._fault("line_too_long", f"a line can have at most {self.max_line_bytes} bytes", self._number + 1)
        if not block and not self.total and not self.faults:
            self._fault("empty_file", "the input file has no lines")
        if not block and not self.faults:
            self._check_repeats()
        self.done = not block or self._is_hopeless()

    def _is_hopeless(self) -> bool:
        return len(self.faults) >= MAX_FAULTS or any(
            fault.code in ("line_too_long", "too_many_lines") for fault in self.faults
        )

    def _check(self, raw: bytes) -> None:
        if self._is_hopeless():
            return
        self.total += 1
        if self.total > self.max_lines:
            self._fault("too_many_lines", f"the input file has more than {self.max_lines} lines")
        elif len(raw) > self.max_line_bytes:
            self._fault("line_too_long", f"a line can have at most {self.max_line_bytes} bytes", self._number)
        else:
            self._check_id(raw)

    def _check_id(self, raw: bytes) -> None:
        try:
            custom_id = _LINE_ID.decode(raw).custom_id
        except msgspec.ValidationError as error:
            self._fault("invalid_custom_id", f"a line needs a custom_id: {error}", self._number, "custom_id")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fault("invalid_json_line", f"this line is not a JSON object: {error}", self._number)
        else:
            if not 0 < len(custom_id) <= MAX_ID:
                message = f"a custom_id has 1 to {MAX_ID} characters"
                self._fault("invalid_custom_id", message, self._number, "custom_id")
            else:
                self._ids.append(hash(custom_id))
                self._numbers.append(self._number)
                if self.model:
                    self._check_model(raw)

    def _check_model(self, raw: bytes) -> None:
        try:
            model = _LINE_MODEL.decode(raw).body.model
        except msgspec.MsgspecError:  # the line's answer will be the error
            return
        if model not in (None, self.model):
            message = (
                f"it asks for the model {model!r}, and the one that answers is {self.model!r}: take 'model' out of the "
                f"lines, or set model.path, or model.served_name={model}"
            )
            self._fault("model_not_found", message, self._number, "model")

    def _check_repeats(self) -> None:
        """Finds repeated ids by hash. Two of a million different ids share one with a chance of 1 in 30 million."""
        ids = np.frombuffer(self._ids, np.int64)
        in_order = np.sort(ids)
        if not (in_order[1:] == in_order[:-1]).any():
            return
        order = np.argsort(ids, kind="stable")
        again = np.flatnonzero(in_order[1:] == in_order[:-1])
        for first, second in zip(order[again].tolist(), order[again + 1].tolist(), strict=True):
            message = f"line {self._numbers[first]} has the same custom_id"
            self._fault("duplicate_custom_id", message, self._numbers[second], "custom_id")

    def _fault(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(Fault(code=code, message=message, param=param, line=line))
