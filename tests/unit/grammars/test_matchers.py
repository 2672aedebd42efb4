from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.cases.grammars import (
    END_IDS,
    ORDER,
    list_allowed,
    load_tokenizer,
    make_vocabulary,
    order_grammar,
    start_rows,
    walk,
)
from toka_async.grammars import matchers as module
from toka_async.grammars import originals
from toka_async.grammars.matchers import GrammarRow, RowMatchers, count_mask_threads
from toka_async.grammars.team_rows import fill
from toka_async.grammars.vocabulary import WORD


@pytest.fixture
def matchers() -> RowMatchers:
    return RowMatchers(make_vocabulary(), 64, 2)


def encode(text: str) -> list[int]:
    return load_tokenizer().encode(text, False)


def test_any_walk_through_masks_is_valid_json(matchers: RowMatchers) -> None:
    slots = start_rows(matchers, [order_grammar()] * 40)
    for output in walk(matchers, slots, seed=1):
        jsonschema.validate(json.loads(load_tokenizer().decode(output)), ORDER)


def test_rows_of_different_grammars_do_not_mix(matchers: RowMatchers) -> None:
    slots = start_rows(matchers, ['start: "yes"', 'start: "no"'] * 8)
    texts = [load_tokenizer().decode(output) for output in walk(matchers, slots, seed=2)]
    assert texts == ["yes", "no"] * 8


def test_a_row_goes_on_where_a_preempted_one_was(matchers: RowMatchers) -> None:
    grammar, text = order_grammar(), '{"id": 17, "state'
    ids = np.asarray(encode(text), np.int32)
    matchers.admit([GrammarRow(0, grammar, np.empty(0, np.int32), 0), GrammarRow(1, grammar, ids, 0)])
    first = matchers.take(np.asarray([0], np.int32))
    for token in ids.tolist():
        matchers.advance(first, np.asarray([token], np.int32))
    at_first, at_second = list_allowed(matchers, np.asarray([0, 1], np.int32))
    assert at_first == at_second


def test_a_complete_row_allows_only_ends_and_then_anything(matchers: RowMatchers) -> None:
    slots = start_rows(matchers, ['start: "a"'])
    rows = matchers.take(slots)
    matchers.advance(rows, np.asarray(encode("a"), np.int32))
    assert list_allowed(matchers, slots) == [sorted(END_IDS)]
    matchers.advance(rows, np.asarray([END_IDS[0]], np.int32))
    # The steps in flight still draw for it.
    for _ in range(3):
        assert len(list_allowed(matchers, slots)[0]) > 600
        matchers.advance(rows, np.asarray([77], np.int32))


def test_ends_are_held_back_while_there_is_anything_else(matchers: RowMatchers) -> None:
    slots = start_rows(matchers, ["start: /a*/", 'start: "a"'], min_tokens=2)
    rows = matchers.take(slots)
    token = np.asarray(encode("a") * 2, np.int32)
    assert not set(list_allowed(matchers, slots)[0]) & set(END_IDS)
    matchers.advance(rows, token)
    longer, complete = list_allowed(matchers, slots)
    assert not set(longer) & set(END_IDS)
    assert complete == sorted(END_IDS)
    matchers.advance(matchers.take(slots[:1]), token[:1])
    assert set(END_IDS) <= set(list_allowed(matchers, slots[:1])[0])


def test_a_token_that_is_not_allowed_breaks_its_row_alone(matchers: RowMatchers) -> None:
    slots = start_rows(matchers, ['start: "ab"'] * 2)
    rows = matchers.take(slots)
    matchers.advance(rows, np.asarray([encode("a")[0], encode("z")[0]], np.int32))
    masks = np.empty((2, matchers.num_words), np.int32)
    assert matchers.fill(rows, masks) == [1]
    assert matchers.fill(rows, masks) == [1], "it stays so"


def test_a_grammar_that_does_not_compile_breaks_its_rows(matchers: RowMatchers) -> None:
    slots = start_rows(matchers, ["start: (", 'start: "a"'])
    masks = np.empty((2, matchers.num_words), np.int32)
    assert matchers.fill(matchers.take(slots), masks) == [0]


def test_fuel_that_runs_out_breaks_its_row_alone(matchers: RowMatchers) -> None:
    hungry = "start: " + " ".join(["item?"] * 3000) + "\nitem: " + " | ".join(f'"{n}"' for n in range(30))
    slots = start_rows(matchers, [hungry, 'start: "a"'])
    masks = np.empty((2, matchers.num_words), np.int32)
    assert matchers.fill(matchers.take(slots), masks) == [0]


def test_a_panic_of_the_library_breaks_no_later_row(
    matchers: RowMatchers, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that copy the same original cannot go on after it, since the library leaves the lexer locked."""
    slots = start_rows(matchers, [order_grammar()] * 2)
    first = matchers.take(slots[:1])
    monkeypatch.setattr(module, "shorten_error", lambda _: "panic: of the library")
    matchers.advance(first, np.array(encode("x")[:1], np.int32))
    masks = np.empty((1, matchers.num_words), np.int32)
    assert matchers.fill(first, masks) == [0]
    assert len(compiled) == 1
    matchers.admit([GrammarRow(5, order_grammar(), np.empty(0, np.int32), 0)])
    assert list_allowed(matchers, np.array([5], np.int32))[0]
    assert len(compiled) == 2


def test_freed_slots_are_forgotten(matchers: RowMatchers) -> None:
    slots = start_rows(matchers, ['start: "a"'] * 3)
    matchers.free(slots[2:])  # it has not started
    assert matchers.find(slots).tolist() == [0, 1]
    matchers.free(slots[1:])
    assert matchers.find(slots).tolist() == [0]
    assert len(matchers) == 1
    assert matchers.has_any(slots)
    assert not matchers.has_any(slots[1:])


def test_a_token_of_a_former_row_does_not_reach_the_next_one(matchers: RowMatchers) -> None:
    """A step in flight still draws for a slot whose row is gone."""
    slots = start_rows(matchers, ['start: "ab"'])
    former = matchers.take(slots)
    matchers.free(slots)
    start_rows(matchers, ['start: "ba"'])
    (before,) = list_allowed(matchers, slots)
    matchers.advance(former, np.asarray(encode("a"), np.int32))
    assert list_allowed(matchers, slots) == [before]


def test_rows_of_many_grammars_in_several_threads_keep_to_theirs() -> None:
    texts = ["yes", "no", "maybe", "never", "often"]
    matchers = RowMatchers(make_vocabulary(), 64, 4)
    slots = start_rows(matchers, [f'start: "{text}"' for text in texts] * 9)
    outputs = walk(matchers, slots, seed=4)
    assert [load_tokenizer().decode(output) for output in outputs] == texts * 9


def test_many_rows_that_have_stopped_or_gone_need_nothing(matchers: RowMatchers) -> None:
    slots = start_rows(matchers, ['start: "a"'] * 9)
    rows = matchers.take(slots)
    for token_id in (encode("a")[0], min(END_IDS)):
        matchers.advance(rows, np.full(9, token_id, np.int32))
    masks = np.zeros((9, matchers.num_words), np.int32)
    assert matchers.fill(rows, masks) == []
    assert (masks == -1).all(), "they may draw anything"
    anything = np.full(9, WORD * matchers.num_words - 1, np.int32)
    matchers.advance(rows, anything)
    matchers.free(slots)
    matchers.advance(rows, anything)
    assert not len(matchers)


def test_parts_are_filled_in_turn_once_rows_have_advanced(matchers: RowMatchers) -> None:
    """Parts mix few rows and many, and rows that drew with rows that begin."""
    slots = start_rows(matchers, ['start: "ab"', 'start: "b"'] * 10)
    sizes = (3, 12, 5)
    cuts = np.split(slots, np.cumsum(sizes)[:-1])
    tables = [np.zeros((size, matchers.num_words), np.int32) for size in sizes]
    drew = np.flatnonzero(np.arange(20) % 2 == 0).astype(np.int32)
    drawn = matchers.take(slots[drew]), np.full(10, encode("a")[0], np.int32)
    drawn[1][0] = encode("b")[0]  # it may not
    failed = list(matchers.fill_parts([matchers.take(part) for part in cuts], tables, drawn))
    assert failed == [[0], [], []]
    allowed = np.concatenate(tables)
    assert (allowed[0] == -1).all()
    only_b = allowed[1]
    assert (allowed[1:] == only_b).all(), "a row of ab that drew a goes on as one of b begins"


def test_an_error_of_a_thread_is_raised(matchers: RowMatchers, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = start_rows(matchers, ['start: "ab"'] * 20, generated=encode("a"))
    list_allowed(matchers, slots)
    monkeypatch.setattr(matchers, "_executors", [object()] * 2)
    with pytest.raises(AttributeError):
        list_allowed(matchers, slots)


def test_an_error_at_a_later_part_is_raised_when_all_threads_are_done(
    matchers: RowMatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = start_rows(matchers, ['start: "ab"'] * 20, generated=encode("a"))
    tables = [np.zeros((10, matchers.num_words), np.int32) for _ in range(2)]
    parts = [matchers.take(slots[:10]), matchers.take(slots[10:])]

    def fail_once(executor: Any, run: Any, masks: Any, end_id: Any) -> Any:
        if masks is tables[1] and not failed:
            failed.append(True)
            raise OSError("of the library")
        return fill(executor, run, masks, end_id)

    failed: list[bool] = []
    monkeypatch.setattr(module, "fill", fail_once)
    with pytest.raises(OSError, match="of the library"):
        list(matchers.fill_parts(parts, tables))
    assert list(matchers.fill_parts(parts, tables)) == [[], []]


def test_rows_without_a_token_share_their_grammars_first_mask(
    matchers: RowMatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = ['start: "a"', 'start: "b" | "c"'] * 10
    slots = start_rows(matchers, grammars)
    monkeypatch.setattr(matchers, "_executors", [object()] * 2)  # nobody is asked
    a, *b_or_c = (encode(text)[0] for text in "abc")
    assert list_allowed(matchers, slots) == [[a], sorted(b_or_c)] * 10
    assert list_allowed(matchers, slots[:2]) == [[a], sorted(b_or_c)], "nor are few rows computed otherwise"


def test_rows_keep_what_their_grammar_begins_with_when_it_is_forgotten(
    matchers: RowMatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "MOST_GRAMMARS", 1)
    rows = matchers.take(start_rows(matchers, ['start: "a"']))
    matchers.admit([GrammarRow(1, 'start: "b"', np.empty(0, np.int32), 0)])
    matchers.take(np.asarray([1], np.int32))
    masks = np.zeros((1, matchers.num_words), np.int32)
    assert matchers.fill(rows, masks) == []
    assert np.unpackbits(masks.view(np.uint8)).sum() == 1


def test_no_two_teams_work_at_copies_of_one_original(compiled: list[str]) -> None:
    """They would wait for each other at the lexer that such rows share. A team's lanes come one after the other."""
    matchers = RowMatchers(make_vocabulary(), 64, 4)
    slots = start_rows(matchers, ['start: "ab"', 'start: "ac"'] * 20, generated=encode("a"))
    rows = matchers.take(slots)
    assert Counter(compiled) == {'start: "ab"': 3, 'start: "ac"': 3}
    assert sorted(np.concatenate(rows.teams).tolist()) == slots.tolist()
    for team, places in enumerate(rows.teams):
        lanes = matchers._lane[slots[places]].tolist()
        assert set(lanes) <= {2 * team, 2 * team + 1}
        assert lanes == sorted(lanes)


def test_threads_leave_cores_to_ranks() -> None:
    assert count_mask_threads(1000) == 1
    assert 1 <= count_mask_threads(1) <= module.MOST_THREADS
