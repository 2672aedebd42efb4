"""A small storm: clients and deaths of every kind, and nothing is lost. `scripts/chaos.py` makes long ones."""

from __future__ import annotations

import asyncio

from tests.chaos.killer import DEATHS
from tests.chaos.storm import Era, Storm, short_folder


def test_nothing_is_lost_in_a_storm() -> None:
    eras = [Era("everything", 1.8, 1, ("group",), is_calm=True), Era("replicas", 2.5, 0.6, DEATHS, is_calm=True)]
    with short_folder() as folder:
        storm = Storm(folder, seed=7, step_ms=1, request_timeout=2, hang_timeout=20)  # machines of CI may be slow
        outcome = asyncio.run(storm.run(eras, lambda _era: None, settle=20))
    figures = outcome.tally.figures()
    assert not outcome.tally.faults, outcome.tally.faults[:5]
    assert outcome.tally.num_lost == 0, figures
    right = {kind for kind, end in outcome.tally.ends if end == "right"}
    assert right >= {"http", "http stream", "zmq", "zmq many", "zmq stream", "batch line"}
    assert outcome.num_starts >= 2
