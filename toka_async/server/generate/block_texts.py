"""The texts of whole samples, of many at once, cut at their stop strings.

Knows token ids and text; knows no requests.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32
from toka_async.messages import Reason
from toka_async.server.engine.rows import TokenBlock
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
        """The text of each sample, end tokens left out as `options` say."""
        token_ids, counts = (block.token_ids, block.counts) if options.keep_ends else without_ends(block)
        ends = np.cumsum(counts)
        if token_ids.size < MANY:
            rows = np.split(token_ids, ends[:-1])
            return [sample_text(self._tokenizer, row.tolist(), options) for row in rows]
        texts, stops = self._table(options.skip_special_tokens).split(token_ids, counts), options.stops
        whole = [SampleText(raw.decode("utf-8", "replace")) for raw in texts]
        for i in [] if stops is None else [i for i, raw in enumerate(texts) if stops.may_be_in(raw)]:
            row = token_ids[ends[i] - counts[i] : ends[i]]
            whole[i] = sample_text(self._tokenizer, row.tolist(), options)
        return whole

    def _table(self, skip_special_tokens: bool) -> ByteTable:
        table = self._tables.get(skip_special_tokens)
        if table is None:
            pieces = self._tokenizer.pieces
            table = ByteTable(pieces.shown if skip_special_tokens else pieces.rest)
            self._tables[skip_special_tokens] = table
        return table


def without_ends(block: TokenBlock) -> tuple[Int32, Int32]:
    """The block's token ids and counts without the end tokens."""
    ends = np.cumsum(block.counts)
    dropped = (block.reasons == int(Reason.STOP)) & (block.counts > 0)
    return np.delete(block.token_ids, ends[dropped] - 1), block.counts - dropped.astype(np.int32)
