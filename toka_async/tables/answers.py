"""Reads the answers of rows, which a run writes in the order in which they end, in the order of the rows.

An index on the disk says where each row's answer begins, so neither answers nor index have to fit in the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from toka_async.arrays import Int64

READ_BYTES = 1 << 20
MISSING = "the run has no answer to this row"


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str | None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    """text: of a continuation. message: of a chat."""

    index: int
    finish_reason: str | None = None
    text: str | None = None
    message: AnswerMessage | None = None


class AnswerUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int = 0


class AnswerBody(msgspec.Struct, frozen=True):
    choices: list[AnswerChoice]
    usage: AnswerUsage


class AnswerFault(msgspec.Struct, frozen=True):
    message: str


class FaultBody(msgspec.Struct, frozen=True):
    error: AnswerFault


class AnswerResponse(msgspec.Struct, frozen=True):
    status_code: int
    body: msgspec.Raw


class AnswerLine(msgspec.Struct, frozen=True):
    custom_id: str
    response: AnswerResponse | None = None
    error: AnswerFault | None = None


class _LineNumber(msgspec.Struct, frozen=True):
    custom_id: str


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """texts, finish_reasons: of each sample. error: why there is no answer; empty if there is one. response: JSON."""

    texts: list[str]
    finish_reasons: list[str]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    response: str = ""


_NUMBER = msgspec.json.Decoder(_LineNumber)
_LINE = msgspec.json.Decoder(AnswerLine)
_BODY = msgspec.json.Decoder(AnswerBody)
_FAULT = msgspec.json.Decoder(FaultBody)


@dataclass(frozen=True, slots=True)
class RowAnswers:
    """starts [rows]: 1 + the byte where an answer begins; negative in the file of errors; 0 where there is none."""

    answers: BinaryIO
    errors: BinaryIO
    starts: Int64

    def read(self, row: int) -> RowAnswer:
        start = int(self.starts[row])
        if not start:
            return RowAnswer([], [], error=MISSING)
        file = self.answers if start > 0 else self.errors
        file.seek(abs(start) - 1)
        return _decode(file.readline())


@contextmanager
def open_answers(answers: Path, errors: Path, index: Path, num_rows: int) -> Iterator[RowAnswers]:
    """Open the result files of a run that has ended. index: a file to write; it is removed at the end."""
    try:
        starts = np.memmap(index, np.int64, "w+", shape=(max(num_rows, 1),))
        _index_file(errors, starts, -1)
        _index_file(answers, starts, 1)
        errors.touch()  # a run without failed rows has no such file
        with answers.open("rb") as good, errors.open("rb") as bad:
            yield RowAnswers(good, bad, starts)
    finally:
        index.unlink(missing_ok=True)


def _index_file(path: Path, starts: Int64, sign: int) -> None:
    if not path.is_file():
        return
    with path.open("rb", buffering=READ_BYTES) as file:
        start = 0
        for line in file:
            starts[int(_NUMBER.decode(line).custom_id)] = sign * (start + 1)
            start += len(line)


def _decode(line: bytes) -> RowAnswer:
    found = _LINE.decode(line)
    if found.response is None:
        return RowAnswer([], [], error=MISSING if found.error is None else found.error.message)
    body = bytes(found.response.body)
    if found.response.status_code != 200:
        return RowAnswer([], [], error=_FAULT.decode(body).error.message, response=body.decode())
    answer = _BODY.decode(body)
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    return RowAnswer(
        [choice.text or (choice.message and choice.message.content) or "" for choice in choices],
        [choice.finish_reason or "" for choice in choices],
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        response=body.decode(),
    )
