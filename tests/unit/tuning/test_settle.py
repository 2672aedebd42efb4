from __future__ import annotations

from pathlib import Path

from tests.drivers.thread_ranks import run_ranks
from toka_async.attention.choice import ChoiceTable, MeasuredShape, choose_always
from toka_async.model.comm import Comm
from toka_async.tuning.settle import settle
from toka_async.tuning.store import TuningCache


class PartChoice:
    """Measures a table of its one part, and counts how often."""

    name = "attention"
    kind = ChoiceTable

    def __init__(self, part: str, facts: object = "alike", admits_all: bool = False) -> None:
        self.part = part
        self.num_measured = 0
        self._facts = facts
        self._admits_all = admits_all

    def describe(self) -> dict[str, object]:
        return {"facts": self._facts}

    def admits(self, answer: ChoiceTable) -> bool:
        return self._admits_all or answer.decode[0].choice == self.part

    def measure(self) -> ChoiceTable:
        self.num_measured += 1
        return choose_always(self.part)


def settled(folder: Path | None, part: str, facts: object = "alike") -> tuple[str, int]:
    """The part that is chosen, and how often it was measured."""
    choice = PartChoice(part, facts)
    return settle(choice, TuningCache(folder, {})).decode[0].choice, choice.num_measured


def test_a_later_start_measures_nothing(tmp_path: Path) -> None:
    assert settled(tmp_path, "own") == ("own", 1)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_ino
    assert settled(tmp_path, "own") == ("own", 0)
    assert file.stat().st_ino == written
    assert settled(tmp_path, "own", "others") == ("own", 1)
    assert settled(None, "own") == ("own", 1)


def test_an_answer_that_cannot_be_used_is_measured_anew(tmp_path: Path) -> None:
    settled(tmp_path, "own")
    assert settled(tmp_path, "library") == ("library", 1)
    assert settled(tmp_path, "library") == ("library", 0)


def test_ranks_take_the_answer_of_the_first(tmp_path: Path) -> None:
    """Whether it finds one or measures; what the others may have does not count, and is not written."""

    def start(*folders: str) -> list[tuple[str, int]]:
        def rank(comm: Comm) -> tuple[str, int]:
            choice = PartChoice(f"of rank {comm.rank}", admits_all=True)
            table = settle(choice, TuningCache(tmp_path / folders[comm.rank], {}), comm)
            return table.decode[0].choice, choice.num_measured

        return run_ranks(2, rank)

    assert start("here", "there") == [("of rank 0", 1)] * 2
    assert not (tmp_path / "there").exists()
    assert start("here", "there") == [("of rank 0", 0)] * 2
    assert start("nowhere", "here") == [("of rank 0", 1)] * 2


def test_a_table_survives_its_way_to_the_other_ranks() -> None:
    table = ChoiceTable(
        (MeasuredShape(1, 2, "a"),), (MeasuredShape(3, 4, "b"),), (MeasuredShape(5, 6, "c"),), ((7, 8), (9, 10))
    )
    assert run_ranks(2, lambda comm: comm.agree(table, ChoiceTable)) == [table] * 2
