"""Texts of many tokens at once, from tables: of whole samples, cut at their stop strings, and of single tokens as JSON.

Knows token ids and text; knows no requests.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import msgspec
import numpy as np

from toka_async.arrays import Int32, Int64
from toka_async.messages import Reason
from toka_async.server.engine.token_block import TokenBlock
from toka_async.server.generate.sample_text import SampleText, TextOptions, sample_text
from toka_async.text.byte_table import ByteTable
from toka_async.text.tokenizer import Tokenizer

MANY = 2048  # tokens for which a table is worth its making


class BlockTexts:
    """Decodes blocks. Its tables are made when they are first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tables: dict[bool, ByteTable] = {}  # without and with special tokens skipped

    def texts(self, block: TokenBlock, options: TextOptions) -> list[SampleText]:
        """The text of each sample, end tokens left out as `options` say; empty ones where no text is needed."""
        if not options.needs_text:
            return [SampleText("")] * len(block)
        if len(block.tokens) < MANY:
            return self._each_text(block, options)
        token_ids, counts = (block.tokens.token_ids, block.counts) if options.keep_ends else without_ends(block)
        ends = np.cumsum(counts)
        texts, stops = self._table(options.skip_special_tokens).split(token_ids, counts), options.stops
        whole = [SampleText(raw.decode("utf-8", "replace")) for raw in texts]
        for i in [] if stops is None else [i for i, raw in enumerate(texts) if stops.may_be_in(raw)]:
            row = token_ids[ends[i] - counts[i] : ends[i]]
            whole[i] = sample_text(self._tokenizer, row.tolist(), options)
        return whole

    def _each_text(self, block: TokenBlock, options: TextOptions) -> list[SampleText]:
        ids, texts, start = block.tokens.token_ids.tolist(), [], 0
        for count, reason in block.rows[2:4].T.tolist():
            end = start + count - (count > 0 and reason == Reason.STOP and not options.keep_ends)
            texts.append(sample_text(self._tokenizer, ids[start:end], options))
            start += count
        return texts

    def _table(self, skip_special_tokens: bool) -> ByteTable:
        table = self._tables.get(skip_special_tokens)
        if table is None:
            pieces = self._tokenizer.pieces
            table = ByteTable(pieces.shown if skip_special_tokens else pieces.rest)
            self._tables[skip_special_tokens] = table
        return table


def without_ends(block: TokenBlock) -> tuple[Int32, Int64]:
    """The block's token ids and counts without the end tokens."""
    ends = np.cumsum(block.counts)
    dropped = (block.reasons == int(Reason.STOP)) & (block.counts > 0)
    return np.delete(block.tokens.token_ids, ends[dropped] - 1), block.counts - dropped


class JsonTexts(dict[int, bytes | None]):
    """Token id -> its text as JSON without quotes, or None where its text depends on tokens around it.

    Those are tokens that are not whole characters, and those with one of `firsts`, the characters that stop strings
    begin with. Texts of other tokens that follow each other are the concatenation, in JSON too. A text is made when its
    token is first seen.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, firsts: AbstractSet[str] = frozenset()) -> None:
        super().__init__()
        self._pieces = tokenizer.pieces.shown if skip_special_tokens else tokenizer.pieces.rest
        self._firsts = firsts

    def __missing__(self, token_id: int) -> bytes | None:
        value = None
        try:
            text = self._pieces[token_id].decode()
        except UnicodeDecodeError:
            pass
        else:
            if self._firsts.isdisjoint(text):
                value = msgspec.json.encode(text)[1:-1]
        self[token_id] = value
        return value
