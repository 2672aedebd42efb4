"""The texts of whole samples, of many at once: for requests that want text and have no stop strings.

Knows token ids and text; knows no requests.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32
from toka_async.messages import Reason
from toka_async.server.rows import Block
from toka_async.server.sample_text import TextOptions
from toka_async.text.byte_table import ByteTable
from toka_async.text.tokenizer import Tokenizer

MANY = 2048  # tokens for which a table is worth its making


class BlockTexts:
    """Decodes blocks. Its tables are made when they are first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tables: dict[bool, ByteTable] = {}  # without and with special tokens skipped

    def texts(self, block: Block, options: TextOptions) -> list[str]:
        """The text of each sample, end tokens left out as `options` say."""
        skip, (token_ids, counts) = options.skip_special_tokens, without_ends(block, options.kept_end_ids)
        if token_ids.size < MANY:
            ends = np.cumsum(counts)
            rows = np.split(token_ids, ends[:-1])
            return [self._tokenizer.decode(row.tolist(), skip, continues=True) for row in rows]
        return [raw.decode("utf-8", "replace") for raw in self._table(skip).split(token_ids, counts)]

    def _table(self, skip_special_tokens: bool) -> ByteTable:
        table = self._tables.get(skip_special_tokens)
        if table is None:
            pieces = self._tokenizer.pieces
            table = ByteTable(pieces.shown if skip_special_tokens else pieces.rest)
            self._tables[skip_special_tokens] = table
        return table


def without_ends(block: Block, kept_end_ids: frozenset[int]) -> tuple[Int32, Int32]:
    """The block's token ids and counts without the end tokens, which have no text unless they are kept."""
    ends = np.cumsum(block.counts)
    dropped = (block.reasons == int(Reason.STOP)) & (block.counts > 0)
    places = ends[dropped] - 1
    if kept_end_ids:
        text = np.isin(block.token_ids[places], list(kept_end_ids))
        dropped[np.flatnonzero(dropped)[text]] = False
        places = places[~text]
    return np.delete(block.token_ids, places), block.counts - dropped.astype(np.int32)
