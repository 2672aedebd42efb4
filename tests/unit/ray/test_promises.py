"""Every promise of the page on fleets names what shows it."""

from __future__ import annotations

import re
from pathlib import Path

import toka_async

ROOT = Path(toka_async.__file__).parents[1]
FLEET = "tests/e2e/fleet/test_ray.py"
CHAOS = "scripts/cluster_chaos.py"


def test_every_promise_names_a_test_that_is_there() -> None:
    page = (ROOT / "toka_async/ray/README.md").read_text(encoding="utf-8")
    table = page.partition("\n## Promises\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    choices = re.findall(r"choices=\[([^\]]*)\]", (ROOT / CHAOS).read_text(encoding="utf-8"))[0]
    for event, _, shown in rows:
        files, names = re.findall(r"`(tests/[\w/]+\.py)`", shown), re.findall(r"`(test_\w+)`", shown)
        runs = re.findall(r"`(\w+)`", shown) if shown.startswith("by hand: ") else []
        assert files or names or runs, event
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in [FLEET, *files])
        assert all(f"def {name}(" in text for name in names), event
        assert all(f'"{run}"' in choices for run in runs), event
