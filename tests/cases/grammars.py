"""Schemas and outputs for tests of structured output, over the built-in model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

import toka_async.demo
from toka_async.arrays import Int32
from toka_async.grammars.lark import make_grammar, write_json
from toka_async.grammars.matchers import GrammarRow, RowMatchers
from toka_async.grammars.vocabulary import GrammarVocabulary
from toka_async.text.tokenizer import Tokenizer, read_for_grammars

DEMO = Path(toka_async.demo.__path__[0])
# Special tokens of models that think and call: for each format, those that it has.
MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
)
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


@cache
def load_marked(marks: tuple[str, ...] = MARKS) -> tuple[Tokenizer, GrammarVocabulary]:
    """The built-in model's tokenizer with further special tokens, whose texts it shows, and its tokens."""
    backend = tokenizers.Tokenizer.from_str(load_tokenizer().backend.to_str())
    backend.add_special_tokens(list(marks))
    tokenizer = Tokenizer(backend).with_shown(marks)
    return tokenizer, GrammarVocabulary(backend.to_str, tokenizer.vocab_size, END_IDS)


def accepts(grammar: str, text: str, marks: tuple[str, ...] = MARKS) -> bool:
    """Tells whether a text with special tokens is a whole output of a grammar."""
    tokenizer, vocabulary = load_marked(marks)
    matcher, ids = vocabulary.compile(grammar), tokenizer.encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def write_random(
    grammar: str, num_texts: int, seed: int, marks: tuple[str, ...] = MARKS, most: int = 600, begun: str = ""
) -> list[str]:
    """Writes texts of allowed tokens at random, which begin as told."""
    tokenizer, vocabulary = load_marked(marks)
    matchers = RowMatchers(vocabulary, num_texts, 1)
    slots = start_rows(matchers, [grammar] * num_texts, generated=tokenizer.encode(begun, False))
    return [begun + tokenizer.decode(ids) for ids in walk(matchers, slots, seed, most)]


def order_grammar() -> str:
    return make_grammar(write_json(ORDER, strict=True))


def matches(grammar: str, text: str) -> bool:
    """Tells whether a text is a whole output of a grammar."""
    matcher = make_vocabulary().compile(grammar)
    ids = load_tokenizer().encode(text, False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def start_rows(matchers: RowMatchers, grammars: list[str], min_tokens: int = 0, generated: Sequence[int] = ()) -> Int32:
    """Admits a row for each grammar; returns their slots."""
    begun = np.array(generated, np.int32)
    matchers.admit([GrammarRow(slot, grammar, begun, min_tokens) for slot, grammar in enumerate(grammars)])
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
    has_ended = [False] * slots.size
    for _ in range(most):
        drawn = np.asarray([rng.choice(each) for each in list_allowed(matchers, slots)], np.int32)
        for place, token in enumerate(drawn.tolist()):
            has_ended[place] |= token in END_IDS
            if not has_ended[place]:
                outputs[place].append(token)
        matchers.advance(matchers.take(slots), drawn)
        if all(has_ended):
            return outputs
    raise AssertionError(f"rows did not end after {most} tokens")
