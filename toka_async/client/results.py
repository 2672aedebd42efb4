"""What a request's answer is made of, and the rows of a message taken apart.

Token ids and log-probs are views of the message that brought them. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from toka_async.arrays import Float32, Int32
from toka_async.protocol import Columns, PromptLogprobs, Results

FinishReason = Literal["stop", "length"]
FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length", "stop")  # by messages.Reason
NO_FLOATS: Float32 = np.empty(0, np.float32)
NO_TOP_IDS: Int32 = np.empty((0, 0), np.int32)
NO_TOPS: Float32 = np.empty((0, 0), np.float32)


@dataclass(slots=True)
class Sample:
    """One of a request's samples.

    token_ids: int32 [t]. text: "" where it was not asked for. stop: the stop string or one of `stop_token_ids` that
    ended it. logprobs: float32 [t], top_ids, top_logprobs: [t, k], where asked for.
    """

    token_ids: Int32
    text: str
    finish_reason: FinishReason | None
    stop: str | int | None = None
    logprobs: Float32 = field(default_factory=lambda: NO_FLOATS)
    top_ids: Int32 = field(default_factory=lambda: NO_TOP_IDS)
    top_logprobs: Float32 = field(default_factory=lambda: NO_TOPS)


@dataclass(slots=True)
class Event(Sample):
    """New tokens of a streamed sample; with `finish_reason`, the last ones. sample: which one."""

    sample: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Entry i is of prompt token i + 1. logprobs: [p - 1]. top_ids, top_logprobs: [p - 1, k]."""

    logprobs: Float32
    top_ids: Int32
    top_logprobs: Float32


@dataclass(slots=True)
class Result:
    """A whole answer. cached_tokens: of the prompt, found in the server's cache."""

    samples: list[Sample]
    cached_tokens: int
    prompt: PromptScores | None = None


@dataclass(slots=True)
class Row:
    """A sample's row in a message. stop: which of the request's stop strings, or -1."""

    id: int
    sample: int
    reason: int
    cached: int
    token_ids: Int32
    text: str = ""
    stop: int = -1
    logprobs: Float32 = field(default_factory=lambda: NO_FLOATS)
    top_ids: Int32 = field(default_factory=lambda: NO_TOP_IDS)
    top_logprobs: Float32 = field(default_factory=lambda: NO_TOPS)


def rows(header: Results, columns: Columns) -> Iterator[Row]:
    """The rows of a message."""
    token_ids, ends = columns["token_ids"], np.cumsum(columns["counts"])
    names = ("ids", "samples", "reasons", "cached")
    lists = [*(columns[name].tolist() for name in names), (ends - columns["counts"]).tolist(), ends.tolist()]
    plain = len(columns) == len(names) + 2
    details = _Details(header, columns)
    for place, (key, sample, reason, cached, start, end) in enumerate(zip(*lists, strict=True)):
        row = Row(key, sample, reason, cached, token_ids[start:end])
        if not plain:
            details.fill(row, place, start, end)
        yield row


class _Details:
    """The columns that not every message has."""

    def __init__(self, header: Results, columns: Columns) -> None:
        self._logprobs = columns.get("logprobs")
        self._top_ids = self._top_logprobs = None
        if header.num_top:
            self._top_ids = columns["top_ids"].reshape(-1, header.num_top)
            self._top_logprobs = columns["top_logprobs"].reshape(-1, header.num_top)
        self._stops = columns["stops"].tolist() if "stops" in columns else None
        self._texts = columns["texts"].tobytes() if "texts" in columns else None
        if self._texts is not None:
            self._text_ends = np.cumsum(columns["text_lengths"]).tolist()

    def fill(self, row: Row, place: int, start: int, end: int) -> None:
        if self._logprobs is not None:
            row.logprobs = self._logprobs[start:end]
        if self._top_ids is not None and self._top_logprobs is not None:
            row.top_ids, row.top_logprobs = self._top_ids[start:end], self._top_logprobs[start:end]
        if self._stops is not None:
            row.stop = self._stops[place]
        if self._texts is not None:
            row.text = self._texts[self._text_ends[place - 1] if place else 0 : self._text_ends[place]].decode()


def prompt_scores(header: PromptLogprobs, columns: Columns) -> PromptScores:
    width = header.num_top
    shape = (-1, width) if width else (0, 0)
    tops, values = columns["top_ids"].reshape(shape), columns["top_logprobs"].reshape(shape)
    return PromptScores(columns["logprobs"], tops, values)
