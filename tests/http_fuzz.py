"""Requests made up by schemathesis from the served document, against a real server, and how they were answered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.serving import Serving

ROOT = Path(__file__).parents[1]
# Small, so that whatever is asked for is generated soon.
SMALL = ("model.max_context=64", "server.max_n=4", "server.max_body_mb=1", "server.max_file_mb=1")
# A schema cannot tell the rules that tie fields together, nor what a chat template takes: valid data may be refused.
OPTIONS = (
    "--exclude-checks=positive_data_acceptance",
    "--continue-on-failure",
    "--no-color",
    "--no-shrink",
    "--request-timeout=30",
    "--generation-database=none",
    "--report-dir=reports",
)
LINE = '{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}\n'

_ANSWERS = re.compile(r'^toka:http_requests_total\{path="(.*)",status="(\d+)"\} (\S+)$', re.MULTILINE)


@dataclass
class Tried:
    """statuses: how many answers had which, by path. output: of schemathesis. passed: it found nothing."""

    passed: bool
    output: str
    statuses: dict[str, Counter[int]] = field(default_factory=dict)

    @property
    def num_cases(self) -> int:
        return sum(counts.total() for counts in self.statuses.values())

    @property
    def num_5xx(self) -> int:
        return sum(count for counts in self.statuses.values() for status, count in counts.items() if status >= 500)


async def seeded(server: Serving) -> dict[str, str]:
    """The ids of a file and of a batch that the server has now, by the names under which the hooks look for them."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "".join(LINE % number for number in range(3)), filename="in.jsonl")
    async with aiohttp.ClientSession(server.url) as http:
        async with http.post("/v1/files", data=form) as response:
            file = (await response.json())["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        async with http.post("/v1/batches", json=body) as response:
            batch = (await response.json())["id"]
    return {"FUZZ_FILE": file, "FUZZ_BATCH": batch}


def fuzz(server: Serving, folder: Path, ids: dict[str, str], *options: str, seed: int = 1) -> Tried:
    """One run of schemathesis, in `folder`, where it leaves its files. Its cases are those of the seed."""
    before = answers(server)
    environment = os.environ | ids | {"SCHEMATHESIS_HOOKS": "tests.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", f"--seed={seed}"]
    done = subprocess.run(
        [*command, *OPTIONS, *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    statuses = {path: counts - before.get(path, Counter()) for path, counts in answers(server).items()}
    return Tried(done.returncode == 0, done.stdout + done.stderr, statuses)


def answers(server: Serving) -> dict[str, Counter[int]]:
    """How many there were up to now, by path and status."""
    counts: dict[str, Counter[int]] = {}
    for path, status, count in _ANSWERS.findall(server.get("/metrics")[1]):
        counts.setdefault(path, Counter())[int(status)] = round(float(count))
    return counts


def load(server: Serving) -> dict[str, Any]:
    """What the server has to do now."""
    status, text = server.get("/load")
    assert status == 200
    loaded: dict[str, Any] = json.loads(text)
    return loaded
