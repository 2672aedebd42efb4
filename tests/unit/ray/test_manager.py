from __future__ import annotations

import pytest

from toka_async.ray.manager import is_hopeless
from toka_async.ray.status import ReplicaStatus, State


@pytest.mark.parametrize(
    ("state", "failures", "seconds", "hopeless"),
    [
        ("placing", 0, 59.0, False),
        ("placing", 0, 60.0, True),
        ("loading", 0, 3600.0, False),
        ("loading", 2, 1.0, False),
        ("waiting", 3, 1.0, True),
    ],
)
def test_a_replica_without_resources_or_a_start_is_hopeless(
    state: State, failures: int, seconds: float, hopeless: bool
) -> None:
    assert is_hopeless(ReplicaStatus(0, state, 0, None, "", failures, seconds)) == hopeless
