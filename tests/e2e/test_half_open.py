"""A peer that vanishes without a FIN, for real: a network namespace whose only link goes down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.half_open import TIMEOUT

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]  # needs no privileges, where the system allows it


def can_make_networks() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "ip", "link"], capture_output=True, timeout=10, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_make_networks(), reason="this system allows no user namespaces, or has no unshare or ip")
def test_a_client_that_vanishes_is_noticed_and_its_request_cancelled() -> None:
    command = [*NAMESPACE, sys.executable, "-m", "tests.processes.half_open"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    seconds, num_held = json.loads(done.stdout)
    assert TIMEOUT / 2 <= seconds <= 2 * TIMEOUT + 1
    assert num_held == 1  # without the listener's options nobody notices
