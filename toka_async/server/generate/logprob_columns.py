"""The `logprobs` of many samples of a completion at once, as JSON: for requests that want the chosen tokens' alone.

The same as `logprobs.legacy_logprobs` makes of each, but for the decimals of numbers. Names of tokens are looked up,
numbers are written, and both are put together as rows of bytes: mostly outside of the interpreter and its lock.
Knows arrays of tokens and the tokenizer's names for them; knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from toka_async.arrays import Int32, Int64
from toka_async.server.engine.rows import TokenRows
from toka_async.server.generate.json_numbers import decimals, integers
from toka_async.server.generate.logprobs import legacy_name
from toka_async.text.byte_table import Bytes, ByteTable, cut, pack
from toka_async.text.detokenize import Detokenizer
from toka_async.text.tokenizer import Tokenizer

WIDTH = 20  # bytes of a token's name as JSON, quotes and what comes with it; longer ones take longer


class LogprobColumns:
    """Writes logprobs. Its tables are made when they are first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_chars: dict[bool, Int32] = {}  # without and with special tokens skipped

    def encode(self, samples: Sequence[TokenRows], skip_special_tokens: bool, start: int) -> list[msgspec.Raw]:
        """The JSON of each sample's `logprobs`; its text begins at character `start` of the choice's."""
        counts = np.array([len(rows) for rows in samples], np.int32)
        token_ids = np.concatenate([rows.token_ids for rows in samples])
        token_ids = np.minimum(token_ids, np.int32(self._tokenizer.vocab_size))  # one that stands for all beyond
        values, lengths = decimals(np.concatenate([rows.logprobs for rows in samples]))
        offsets, offset_lengths = integers(self._offsets(token_ids, counts, skip_special_tokens) + start)
        names, name_lengths, long_names = self._names.rows(token_ids)
        keys, key_lengths, long_keys = self._keys.rows(token_ids)
        columns = (
            cut(pack(names, long_names), name_lengths, counts),
            cut(pack(followed(values, b","), ()), lengths + 1, counts),
            cut(pack(followed(values, b"},", keys), long_keys), key_lengths + lengths + 2, counts),
            cut(pack(followed(offsets, b","), ()), offset_lengths + 1, counts),
        )
        return [
            msgspec.Raw(
                b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}'
                % (tokens[:-1], logprobs[:-1], tops[:-1], at[:-1])  # without the last comma
            )
            for tokens, logprobs, tops, at in zip(*columns, strict=True)
        ]

    @cached_property
    def _quoted(self) -> list[bytes]:
        """Names as JSON by token id, the last one for ids beyond the vocabulary."""
        return [
            msgspec.json.encode(legacy_name(self._tokenizer, i)) for i in range(self._tokenizer.vocab_size + 1)
        ]  # fmt: skip

    @cached_property
    def _names(self) -> ByteTable:
        return ByteTable({i: name + b"," for i, name in enumerate(self._quoted)}, WIDTH)

    @cached_property
    def _keys(self) -> ByteTable:
        return ByteTable({i: b"{" + name + b":" for i, name in enumerate(self._quoted)}, WIDTH)

    def _offsets(self, token_ids: Int32, counts: Int32, skip_special_tokens: bool) -> Int64:
        """Where each token begins in its sample's text [t]."""
        table = self._chars(skip_special_tokens)
        num_chars = table.take(token_ids).astype(np.int64)
        ends = np.cumsum(counts, dtype=np.int64)
        self._count_parts(token_ids, num_chars, ends, skip_special_tokens)
        after = np.cumsum(num_chars)
        bases = np.concatenate([[0], after])[ends - counts]
        offsets: Int64 = after - num_chars - np.repeat(bases, counts)
        return offsets

    def _count_parts(self, token_ids: Int32, num_chars: Int64, ends: Int64, skip_special_tokens: bool) -> None:
        """Fill in the characters that tokens add where they, or some just before them, are parts of characters."""
        places, done = np.flatnonzero(num_chars < 0), 0
        ends_of = ends[np.searchsorted(ends, places, side="right")]  # of the places' samples
        for place, end in zip(places.tolist(), ends_of.tolist(), strict=True):
            if place < done:
                continue
            detokenizer, done = Detokenizer(self._tokenizer, skip_special_tokens, continues=True), place
            while done == place or (detokenizer.holds and done < end):
                num_chars[done] = len(detokenizer.push((int(token_ids[done]),)))
                done += 1

    def _chars(self, skip_special_tokens: bool) -> Int32:
        """By token id: characters of its text; -1 where it is not whole characters."""
        table = self._num_chars.get(skip_special_tokens)
        if table is None:
            pieces = self._tokenizer.pieces.shown if skip_special_tokens else self._tokenizer.pieces.rest
            table = np.array([count_chars(pieces[i]) for i in range(self._tokenizer.vocab_size + 1)], np.int32)
            self._num_chars[skip_special_tokens] = table
        return table


def count_chars(piece: bytes) -> int:
    """-1: they are not whole."""
    try:
        return len(piece.decode())
    except UnicodeDecodeError:
        return -1


def followed(rows: Bytes, tail: bytes, head: Bytes | None = None) -> Bytes:
    """Each row with the same bytes after it, and another row before it."""
    parts = [rows, np.broadcast_to(np.frombuffer(tail, np.uint8), (len(rows), len(tail)))]
    return np.concatenate(parts if head is None else [head, *parts], axis=1)
