"""The parts of a request's answer, and the reader of messages' rows.

Token ids and log-probs are views of the message that brought them. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from toka_async.arrays import Float32, Int32
from toka_async.protocol import Columns, PromptLogprobs, ProtocolError, Results

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length", "stop", "abort", "error")  # by messages.Reason
SHOWN = 60  # characters of a text in a repr
PER_ROW = ("ids", "samples", "counts", "reasons", "cached")
NO_FLOATS: Float32 = np.empty(0, np.float32)
NO_INTEGERS: Int32 = np.empty(0, np.int32)
NO_TOP_IDS: Int32 = np.empty((0, 0), np.int32)
NO_TOPS: Float32 = np.empty((0, 0), np.float32)


class VersionSpan(NamedTuple):
    """Tokens of a row, from `start` up to `end`, that one version of the weights generated."""

    version: str
    start: int
    end: int


@dataclass(slots=True, repr=False)
class Sample:
    """One of a request's samples.

    token_ids: int32 [t]. text: "" unless asked for. stop: the stop string or one of `stop_token_ids` that ended it.
    logprobs: float32 [t], top_ids, top_logprobs: [t, k], if asked for. kept, masses: int32 and float32 [t], how many
    tokens the filters kept and their share of the distribution, for `logprobs_mode="processed"`. versions: which
    weights generated the tokens.
    """

    token_ids: Int32
    text: str
    finish_reason: FinishReason | None
    stop: str | int | None = None
    logprobs: Float32 = field(default_factory=lambda: NO_FLOATS)
    top_ids: Int32 = field(default_factory=lambda: NO_TOP_IDS)
    top_logprobs: Float32 = field(default_factory=lambda: NO_TOPS)
    kept: Int32 = field(default_factory=lambda: NO_INTEGERS)
    masses: Float32 = field(default_factory=lambda: NO_FLOATS)
    versions: tuple[VersionSpan, ...] = ()

    def __repr__(self) -> str:
        """Short: the number of tokens, and the beginning of a long text."""
        text = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}…"
        stop = "" if self.stop is None else f", stop={self.stop!r}"
        return f"{type(self).__name__}({text!r}, {self.token_ids.size} tokens, {self.finish_reason}{stop})"


@dataclass(slots=True, repr=False)
class Event(Sample):
    """New tokens of a streamed sample; the last ones if `finish_reason` is set. sample: its number."""

    sample: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probs of a prompt: entry i belongs to token i + 1. logprobs: [p - 1]. top_ids, top_logprobs: [p - 1, k].

    ranks: [p - 1], of the tokens among all, from 1.
    """

    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


@dataclass(slots=True, repr=False)
class Result:
    """A whole answer. cached_tokens: tokens of the prompt found in the server's cache."""

    samples: list[Sample]
    cached_tokens: int
    prompt: PromptScores | None = None

    def __repr__(self) -> str:
        more = f", and {len(self.samples) - 1} more" if len(self.samples) > 1 else ""
        first = repr(self.samples[0]) if self.samples else ""
        return f"Result([{first}{more}], cached_tokens={self.cached_tokens})"


@dataclass(slots=True)
class Row:
    """A sample's row in a message. stop: index of the request's stop string, or -1."""

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
    kept: Int32 = field(default_factory=lambda: NO_INTEGERS)
    masses: Float32 = field(default_factory=lambda: NO_FLOATS)
    versions: tuple[VersionSpan, ...] = ()


def split_rows(header: Results, columns: Columns) -> Iterator[Row]:
    """Split a message into rows. Raises ProtocolError, before the first row, if the columns do not match."""
    check_rows(header, columns)
    return _iterate_rows(header, columns)


def check_rows(header: Results, columns: Columns) -> None:
    """Raises ProtocolError that names the column."""
    for name in (*PER_ROW, "token_ids"):
        if name not in columns:
            raise ProtocolError(f"results have the column {name!r}", name)
    num_rows, num_tokens = columns["ids"].size, columns["token_ids"].size
    for name in (*PER_ROW, "text_lengths", "stops"):
        check_size(columns, name, num_rows)
    check_lengths(columns, "counts", "token_ids")
    if "texts" in columns or "text_lengths" in columns:
        check_lengths(columns, "text_lengths", "texts")
    check_scores(header.num_top, columns, num_tokens)
    for name in ("kept", "masses"):
        check_size(columns, name, num_tokens)
    check_spans(header, columns)
    if num_rows and not 0 <= int(columns["reasons"].min()) <= int(columns["reasons"].max()) < len(FINISH):
        raise ProtocolError("there is no such reason", "reasons")


def check_spans(header: Results, columns: Columns) -> None:
    """Check that spans, if there are any, say of each token which weights generated it."""
    if not {"span_counts", "span_ends", "span_versions"} & columns.keys():
        return
    check_lengths(columns, "span_counts", "span_ends")
    counts, ends = columns["span_counts"], columns["span_ends"]
    check_size(columns, "span_counts", columns["ids"].size)
    if "span_versions" not in columns:
        raise ProtocolError("the column 'span_versions' is missing", "span_versions")
    check_size(columns, "span_versions", ends.size)
    versions = columns["span_versions"]
    if versions.size and not 0 <= int(versions.min()) <= int(versions.max()) < len(header.versions):
        raise ProtocolError("there is no such version", "span_versions")
    lasts = np.cumsum(counts) - 1
    of_row = np.repeat(np.arange(counts.size), counts)
    is_first = np.diff(of_row, prepend=-1) != 0
    steps = np.diff(ends, prepend=0)
    has_spans = counts > 0
    is_whole = (ends[lasts[has_spans]] == columns["counts"][has_spans]).all()
    if not is_whole or (columns["counts"][~has_spans] != 0).any() or (np.where(is_first, ends, steps) < 1).any():
        raise ProtocolError("spans do not cover the tokens of their rows", "span_ends")


def check_size(columns: Columns, name: str, size: int) -> None:
    if name in columns and columns[name].size != size:
        raise ProtocolError(f"{columns[name].size} {name} where {size} are needed", name)


def check_lengths(columns: Columns, name: str, of: str) -> None:
    """Check that a column of lengths divides the column `of`."""
    for each in (name, of):
        if each not in columns:
            raise ProtocolError(f"the column {each!r} is missing", each)
    lengths = columns[name]
    if (lengths.size and int(lengths.min()) < 0) or int(lengths.sum(dtype=np.int64)) != columns[of].size:
        raise ProtocolError(f"{name} do not divide {of}", name)


def check_scores(num_top: int, columns: Columns, num_tokens: int) -> None:
    check_size(columns, "logprobs", num_tokens)
    for name in ("top_ids", "top_logprobs"):
        if num_top and name not in columns:
            raise ProtocolError(f"the column {name!r} is missing", name)
        check_size(columns, name, num_tokens * num_top)


def _iterate_rows(header: Results, columns: Columns) -> Iterator[Row]:
    token_ids, ends = columns["token_ids"], np.cumsum(columns["counts"])
    names = ("ids", "samples", "reasons", "cached")
    lists = [*(columns[name].tolist() for name in names), (ends - columns["counts"]).tolist(), ends.tolist()]
    plain = len(columns) == len(names) + 2
    details = _Details(header, columns)
    version = header.versions[0]
    for place, (key, sample, reason, cached, start, end) in enumerate(zip(*lists, strict=True)):
        row = Row(key, sample, reason, cached, token_ids[start:end])
        row.versions = (VersionSpan(version, 0, end - start),) if end > start else ()
        if not plain:
            details.fill(row, place, start, end)
        yield row


class _Details:
    def __init__(self, header: Results, columns: Columns) -> None:
        self._logprobs = columns.get("logprobs")
        self._top_ids = self._top_logprobs = None
        if header.num_top:
            self._top_ids = columns["top_ids"].reshape(-1, header.num_top)
            self._top_logprobs = columns["top_logprobs"].reshape(-1, header.num_top)
        self._kept, self._masses = columns.get("kept"), columns.get("masses")
        self._names = header.versions
        self._spans: list[list[int]] | None = None
        if "span_counts" in columns:
            ends = np.cumsum(columns["span_counts"])
            self._spans = [(ends - columns["span_counts"]).tolist(), ends.tolist()]
            self._span_ends, self._span_versions = columns["span_ends"].tolist(), columns["span_versions"].tolist()
        self._stops = columns["stops"].tolist() if "stops" in columns else None
        self._texts = columns["texts"].tobytes() if "texts" in columns else None
        if self._texts is not None:
            self._text_ends = np.cumsum(columns["text_lengths"]).tolist()

    def fill(self, row: Row, place: int, start: int, end: int) -> None:
        if self._logprobs is not None:
            row.logprobs = self._logprobs[start:end]
        if self._top_ids is not None and self._top_logprobs is not None:
            row.top_ids, row.top_logprobs = self._top_ids[start:end], self._top_logprobs[start:end]
        if self._kept is not None and self._masses is not None:
            row.kept, row.masses = self._kept[start:end], self._masses[start:end]
        if self._spans is not None:
            row.versions = self._list_spans(self._spans[0][place], self._spans[1][place])
        if self._stops is not None:
            row.stop = self._stops[place]
        if self._texts is not None:
            row.text = decode_text(self._texts[self._text_ends[place - 1] if place else 0 : self._text_ends[place]])

    def _list_spans(self, first: int, last: int) -> tuple[VersionSpan, ...]:
        ends = self._span_ends[first:last]
        names = (self._names[number] for number in self._span_versions[first:last])
        return tuple(map(VersionSpan, names, [0, *ends[:-1]], ends))


def decode_text(text: bytes) -> str:
    """Raises ProtocolError."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a text is not valid UTF-8: {error.reason}", "texts") from None


def read_prompt_scores(header: PromptLogprobs, columns: Columns) -> PromptScores:
    """Raises ProtocolError if the columns do not match."""
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        if name not in columns:
            raise ProtocolError(f"log-probs of a prompt have the column {name!r}", name)
    check_scores(header.num_top, columns, columns["logprobs"].size)
    check_size(columns, "ranks", columns["logprobs"].size)
    width = header.num_top
    shape = (-1, width) if width else (0, 0)
    tops, values = columns["top_ids"].reshape(shape), columns["top_logprobs"].reshape(shape)
    return PromptScores(columns["logprobs"], columns["ranks"], tops, values)
