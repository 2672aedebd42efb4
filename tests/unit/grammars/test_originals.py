from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cases.grammars import make_vocabulary
from toka_async.grammars import originals as module
from toka_async.grammars.originals import Originals
from toka_async.grammars.vocabulary import GrammarVocabulary

LANES = 3
A, B = 'start: "a"', 'start: "b"'


@pytest.fixture
def originals() -> Iterator[Originals]:
    with ThreadPoolExecutor(LANES) as threads:
        yield Originals(make_vocabulary(), LANES, threads)


def list_lanes(originals: Originals, grammar: str, number: int) -> list[int]:
    return [lane for lane, _ in originals.deal(grammar, number)]


def test_a_grammar_is_compiled_once_for_few_rows_and_once_a_lane_for_many(
    originals: Originals, compiled: list[str]
) -> None:
    originals.add_rows(Counter({A: module.ROWS_EACH}))
    assert len(compiled) == 1
    originals.add_rows(Counter({A: 1}))
    assert len(compiled) == 2
    originals.add_rows(Counter({A: 1000}))
    assert len(compiled) == LANES
    assert Counter(list_lanes(originals, A, 3 * LANES)) == dict.fromkeys(range(LANES), 3)


def test_grammars_of_few_rows_go_to_different_lanes(originals: Originals) -> None:
    grammars = [A, B, 'start: "c"']
    originals.add_rows(Counter(grammars))
    assert sorted(list_lanes(originals, grammar, 1)[0] for grammar in grammars) == [*range(LANES)]


def test_a_grammar_is_compiled_as_soon_as_it_is_expected(originals: Originals, compiled: list[str]) -> None:
    originals.expect(A)
    originals.expect(A)
    originals.add_rows(Counter({A: 1}))
    originals.expect(A)
    assert compiled == [A]


def test_a_grammar_that_takes_long_is_compiled_once(
    originals: Originals, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a rank wait while it compiles."""
    monkeypatch.setattr(module, "LONG", -1)
    originals.add_rows(Counter({A: 40}))
    assert len(compiled) == 1


def test_a_grammar_that_does_not_compile_has_no_copies(originals: Originals, compiled: list[str]) -> None:
    """It is compiled once: rows that wait for it would stop all others."""
    for _ in range(3):
        originals.expect("start: (")
        originals.add_rows(Counter({"start: (": 2, A: 1}))
        assert not list_lanes(originals, "start: (", 2)
        assert len(list_lanes(originals, A, 1)) == 1
    assert compiled.count("start: (") == 1


def test_a_grammar_at_which_the_library_fails_has_no_copies(
    originals: Originals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("of the library")

    monkeypatch.setattr(GrammarVocabulary, "compile", fail)
    originals.expect(A)
    originals.add_rows(Counter({A: 1, B: 1}))
    assert not list_lanes(originals, A, 1)
    assert not list_lanes(originals, B, 1)


def test_grammars_that_nobody_asked_for_lately_are_dropped(
    originals: Originals, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_GRAMMARS", 2)
    many = [A, B, 'start: "c"']
    originals.add_rows(Counter(many))
    assert all(list_lanes(originals, grammar, 1) for grammar in many), "those of rows that start are kept"
    for grammar in (B, 'start: "c"', A):
        originals.add_rows(Counter([grammar]))
    assert compiled == [*many, A]


def test_an_original_that_is_dropped_has_no_further_copies(originals: Originals, compiled: list[str]) -> None:
    originals.add_rows(Counter({A: 1}))
    (lane,) = list_lanes(originals, A, 1)
    originals.drop(A, lane)
    originals.add_rows(Counter({A: 1}))
    assert len(compiled) == 2
    assert list_lanes(originals, A, 1)
