from __future__ import annotations

import pytest

from toka_async.ray.placement import explain_waiting

SMALL, LARGE = {"CPU": 64.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("nodes", "free", "why"),
    [
        ([], {}, "and the cluster has no node"),
        ([SMALL, SMALL], SMALL, "the most that a node has is 4 GPU"),
        ([{"CPU": 64.0}], {"CPU": 64.0}, "the most that a node has is 0 GPU"),
        ([SMALL, LARGE], SMALL, "nodes have each of it, but none has all"),
        ([SMALL, {"CPU": 16.0, "GPU": 8.0}], {"CPU": 80.0}, "free on all 2 nodes together is 0 GPU, 80 CPU"),
    ],
)
def test_what_is_missing_is_said(nodes: list[dict[str, float]], free: dict[str, float], why: str) -> None:
    said = explain_waiting({"GPU": 8.0, "CPU": 9.0}, nodes, free)
    assert said.startswith("it needs 8 GPU, 9 CPU on one node")
    assert said.endswith(why)
