"""Schemas and outputs for tests of structured output, over the built-in model's tokens."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import toka_async.demo
from toka_async.arrays import Int32
from toka_async.grammars.lark import make_grammar, write_json
from toka_async.grammars.matchers import GrammarRow, RowMatchers
from toka_async.grammars.vocabulary import GrammarVocabulary
from toka_async.text.tokenizer import Tokenizer, read_for_grammars

DEMO = Path(toka_async.demo.__path__[0])
NUM_TOKENS, END_IDS = 608, (0, 2)
# Small blanks: a model that was never taught JSON likes them.
TIGHT = {"whitespace_pattern": "[ ]{0,1}"}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 9999},
        "state": {"enum": ["new", "paid", "sent"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "price": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 99}]},
    },
    "required": ["id", "state", "tags", "price"],
    "additionalProperties": False,
    "x-guidance": TIGHT,
}


@cache
def make_vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(partial(read_for_grammars, DEMO), NUM_TOKENS, END_IDS)


@cache
def load_tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def order_grammar() -> str:
    return make_grammar(write_json(ORDER, strict=True))


def matches(grammar: str, text: str) -> bool:
    """Tells whether a text is a whole output of a grammar."""
    matcher = make_vocabulary().compile(grammar)
    ids = load_tokenizer().encode(text, False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def start_rows(matchers: RowMatchers, grammars: list[str], min_tokens: int = 0) -> Int32:
    """Admits a row for each grammar; returns their slots."""
    none = np.empty(0, np.int32)
    matchers.admit([GrammarRow(slot, grammar, none, min_tokens) for slot, grammar in enumerate(grammars)])
    return np.arange(len(grammars), dtype=np.int32)


def list_allowed(matchers: RowMatchers, slots: Int32) -> list[list[int]]:
    """Lists the ids that each row may draw next."""
    masks = np.empty((slots.size, matchers.num_words), np.int32)
    assert not matchers.fill(matchers.take(slots), masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def walk(matchers: RowMatchers, slots: Int32, seed: int, most: int = 400) -> list[list[int]]:
    """Draws allowed tokens at random until all rows are over; returns the rows' tokens, without their end."""
    rng = np.random.default_rng(seed)
    outputs: list[list[int]] = [[] for _ in slots]
    rows = matchers.take(slots)
    for _ in range(most):
        drawn = np.asarray([rng.choice(each) for each in list_allowed(matchers, slots)], np.int32)
        for row, output, token in zip(rows, outputs, drawn.tolist(), strict=True):
            if not row.is_over and token not in END_IDS:
                output.append(token)
        matchers.advance(rows, drawn)
        if all(row.is_over for row in rows):
            return outputs
    raise AssertionError(f"rows did not end after {most} tokens")
