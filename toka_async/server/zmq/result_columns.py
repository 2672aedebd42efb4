"""The columns of results: made from the engine's rows or from finished samples, and parts of them.

Knows the protocol's columns; knows no engine and no client.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toka_async.arrays import Bool, Int32
from toka_async.protocol import Columns, Results
from toka_async.server.engine.request_columns import select_parts
from toka_async.server.engine.token_block import TokenBlock, TokenRows, concat_rows
from toka_async.server.engine.weight_versions import list_spans

PER_ROW = ("ids", "samples", "counts", "reasons", "cached", "text_lengths", "stops", "span_counts")
PER_SPAN = ("span_ends", "span_versions")


def block_columns(block: TokenBlock, names: Sequence[str]) -> tuple[Results, Columns]:
    """The columns of a block whose keys are the client's ids; `names`: of versions of the weights, by number."""
    columns: Columns = {
        "ids": block.keys,
        "samples": block.samples.astype(np.int32),
        "counts": block.counts.astype(np.int32),
        "reasons": block.reasons.astype(np.int32),
        "cached": block.cached.astype(np.int32),
    }
    version = int(block.versions[0]) if len(block) else 0
    return with_tokens(columns, block.tokens, block.num_logprobs, names, version)


def with_tokens(
    columns: Columns, tokens: TokenRows, num_logprobs: int, names: Sequence[str], version: int
) -> tuple[Results, Columns]:
    """The columns and those of the tokens, log-probs where they were asked for, with their header.

    version: of the tokens that have none of their own.
    """
    columns["token_ids"] = tokens.token_ids
    if num_logprobs >= 0:
        columns["logprobs"] = tokens.logprobs
    if num_logprobs > 0:
        columns |= {"top_ids": tokens.top_ids.reshape(-1), "top_logprobs": tokens.top_logprobs.reshape(-1)}
    if tokens.kept.size:
        columns |= {"kept": tokens.kept, "masses": tokens.masses}
    versions = (names[version],)
    if tokens.versions.size:
        numbers = np.unique(tokens.versions)
        versions = tuple(names[number] for number in numbers.tolist())
        if numbers.size > 1:
            columns |= span_columns(columns["counts"], np.searchsorted(numbers, tokens.versions).astype(np.int32))
    return Results(seq=0, num_top=max(num_logprobs, 0), versions=versions, columns=tuple(columns)), columns


def span_columns(counts: Int32, versions: Int32) -> Columns:
    """The columns of spans of rows with `counts` tokens; `versions`: of each token."""
    ends = np.cumsum(counts)
    spans = [list_spans(versions[end - count : end]) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
    each = [span for of_row in spans for span in of_row]
    return {
        "span_counts": np.asarray([len(of_row) for of_row in spans], np.int32),
        "span_ends": np.asarray([end for _, end, _ in each], np.int32),
        "span_versions": np.asarray([number for _, _, number in each], np.int32),
    }


class SampleColumns:
    """Collects samples of one request, or new parts of them.

    Args:
        num_logprobs: -1 for none.
        names: of versions of the weights, by number.
        text, stops: whether there are such columns.
    """

    def __init__(
        self, key: int, num_cached: int, num_logprobs: int, names: Sequence[str], *, text: bool, stops: bool
    ) -> None:
        self._key = key
        self._num_cached = num_cached
        self._num_logprobs = num_logprobs
        self._names = names
        self._has_text = text
        self._has_stops = stops
        self._rows: list[tuple[int, int, int]] = []  # sample, reason, stop
        self._parts: list[TokenRows] = []
        self._texts: list[bytes] = []

    def add(self, sample: int, rows: TokenRows, text: str, reason: int, stop: int) -> None:
        self._rows.append((sample, reason, stop))
        self._parts.append(rows)
        self._texts.append(text.encode("utf-8", "replace") if self._has_text else b"")

    def columns(self) -> tuple[Results, Columns]:
        """Of all that was added, something at least."""
        samples, reasons, stops = np.asarray(self._rows, np.int32).T
        columns: Columns = {
            "ids": np.full(samples.size, self._key, np.int64),
            "samples": samples,
            "counts": lengths(self._parts),
            "reasons": reasons,
            "cached": np.full(samples.size, self._num_cached, np.int32),
        }
        if self._has_text:
            columns |= {"text_lengths": lengths(self._texts), "texts": np.frombuffer(b"".join(self._texts), np.uint8)}
        if self._has_stops:
            columns["stops"] = stops
        return with_tokens(columns, concat_rows(self._parts), self._num_logprobs, self._names, 0)


def lengths(parts: Sequence[TokenRows] | Sequence[bytes]) -> Int32:
    return np.asarray([len(part) for part in parts], np.int32)


def chosen(columns: Columns, rows: Bool) -> Columns:
    """Some rows, by mask [r], with their tokens and texts."""
    counts = columns["counts"]
    num_tokens = max(1, int(counts.sum()))
    made: Columns = {}
    for name, values in columns.items():
        if name in PER_ROW:
            made[name] = values[rows]
        elif name in PER_SPAN:
            made[name] = select_parts(values, columns["span_counts"], rows)
        elif name == "texts":
            made[name] = select_parts(values, columns["text_lengths"], rows)
        else:
            made[name] = select_parts(values, counts * (values.size // num_tokens), rows)
    return made
