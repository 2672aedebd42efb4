from __future__ import annotations

import re
from pathlib import Path

import pytest

from toka_async.cli.habits import ASSIGNMENTS, OPTIONS, Habit
from toka_async.config import load_config
from toka_async.config.load import list_keys

GUIDE = Path(__file__).parents[3] / "configs" / "README.md"


@pytest.mark.parametrize("name", [*OPTIONS, *ASSIGNMENTS])
def test_every_habit_is_a_key_or_an_answer(name: str) -> None:
    habit = OPTIONS[name] if name in OPTIONS else ASSIGNMENTS[name]
    assert bool(habit.key) != bool(habit.answer)
    if habit.key:
        assert habit.key in list_keys()
    for value in [habit.value, *habit.words.values()]:
        if value:
            load_config(None, [f"{habit.key}={value}"])


def rows(title: str) -> dict[str, str]:
    """The first two columns of the table under a heading of the guide; a row may name several options."""
    section = GUIDE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", section, re.MULTILINE)
    return {name: here for names, here in found for name in re.findall(r"`([^`]+)`", names)}


@pytest.mark.parametrize(("title", "habits"), [("From vLLM", OPTIONS), ("From Tokasaurus", ASSIGNMENTS)])
def test_the_guide_says_the_same(title: str, habits: dict[str, Habit]) -> None:
    told = {name: here for name, here in rows(title).items() if name in habits}
    assert len(told) > 12
    for name, here in told.items():
        assert habits[name].key in here, name
