from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor

from tests.cases.grammars import load_tokenizer, make_vocabulary
from toka_async.grammars.team_rows import TeamRows, advance, fill

A, B, C = (load_tokenizer().encode(text, False)[0] for text in "abc")
HUNGRY = "start: " + " ".join(["item?"] * 3000) + "\nitem: " + " | ".join(f'"{n}"' for n in range(30))


def make_rows(grammars: list[str], begun: list[bool] | None = None) -> TeamRows:
    """The slot of row i is 10 + i, its place 2 i. begun: whether each has a token, as if it had."""
    matchers: list[Any] = [make_vocabulary().compile(grammar) for grammar in grammars]
    slots, places = np.arange(10, 10 + len(matchers), dtype=np.int32), 2 * np.arange(len(matchers))
    asked = [True] * len(matchers) if begun is None else begun
    pairs = [
        pair for pair, is_asked in zip(zip(matchers, places.tolist(), strict=True), asked, strict=True) if is_asked
    ]
    return TeamRows(slots, places, matchers, pairs)


def test_rows_advance_each_by_its_token() -> None:
    rows = make_rows(['start: "a" "b" | "c" "a"'] * 2)
    assert not advance(LLExecutor(1), rows, [A, C])
    masks = np.zeros((4, make_vocabulary().num_words), np.int32)
    assert not fill(LLExecutor(1), rows, masks, None)
    bits = np.unpackbits(masks[::2].view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[B], [A]]
    assert not masks[1::2].any(), "other rows are others' work"


def test_rows_whose_token_is_not_allowed_fail() -> None:
    failed = advance(LLExecutor(1), make_rows(['start: "ab" | "c"'] * 4), [A, B, C, B])
    assert [slot for slot, _ in failed] == [11, 13]
    assert all("doesn't satisfy" in words for _, words in failed)


@pytest.mark.parametrize("end_id", [None, 0])
def test_rows_without_a_mask_fail(end_id: int | None) -> None:
    """Not those that may end, nor those that are not asked."""
    rows = make_rows([HUNGRY, "start: /a*/", HUNGRY, HUNGRY], begun=[True, True, False, True])
    masks = np.full((8, make_vocabulary().num_words), -1, np.int32)
    failed = fill(LLExecutor(1), rows, masks, end_id)
    assert [slot for slot, _ in failed] == [10, 13]
    assert (masks[4] == -1).all()


def test_a_team_without_rows_does_nothing() -> None:
    rows = make_rows([])
    idle: Any = None
    assert not advance(idle, rows, [])
    assert not fill(idle, rows, np.zeros((0, make_vocabulary().num_words), np.int32), 0)
