"""Requests made up by schemathesis from the served document, against a real server, and how they were answered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from tests.cases.lines import URLS, encoded
from tests.drivers.until import wait_until
from tests.processes.serving import Serving

ROOT = Path(__file__).parents[2]
# Small, so that whatever is asked for is generated soon.
SMALL = (
    *("model.max_context=64", "limits.max_n=4", "limits.max_body_mb=1", "batches.max_file_mb=1"),
    "server.admin=true",
)
# After these nothing is answered until something else is done, or they wait for a trainer that does not come.
PAUSES = (
    *("pause", "pauseGeneration", "sleep", "releaseCacheMemory", "releaseMemoryOccupation", "collectiveRpc"),
    *("startWeightUpdate", "updateWeights", "initWeightTransferEngine", "initWeightsUpdateGroup"),
    *("beginWeightUpdate", "updateWeightsFromDistributed", "updateWeightsFromDisk"),
)
# A schema cannot tell the rules that tie fields together, nor what a chat template takes: valid data may be refused.
OPTIONS = (
    "--exclude-checks=positive_data_acceptance",
    *(f"--exclude-operation-id={name}" for name in PAUSES),
    "--continue-on-failure",
    "--no-color",
    "--no-shrink",
    "--request-timeout=30",
    "--generation-database=none",
    "--report-dir=reports",
)
LONGEST = 300.0  # seconds for a batch

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


def seeded(server: Serving) -> dict[str, str]:
    """The ids of a file and of a batch that the server has now, by the names under which the hooks look for them."""
    lines = [{"prompt": "x", "max_tokens": 2}] * 3
    batch = run_batch(server, [{"method": "POST", "url": URLS[0], "body": body} for body in lines])
    return {"FUZZ_FILE": batch.input_file_id, "FUZZ_BATCH": batch.id}


def run_batch(server: Serving, lines: Sequence[dict[str, Any]]) -> Batch:
    """A batch of these lines, named by their numbers, when it has ended; fails unless each has ended exactly once."""
    data = b"\n".join(encoded(line, str(number)) for number, line in enumerate(lines))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        def final() -> Batch | None:
            found = client.batches.retrieve(batch.id)
            return None if found.status in ("validating", "in_progress", "finalizing") else found

        batch = wait_until(final, seconds=LONGEST)
        assert batch.status == "completed", batch
        files = [client.files.content(name).content for name in (batch.output_file_id, batch.error_file_id) if name]
    ended = [json.loads(line) for content in files for line in content.splitlines()]
    assert Counter(line["custom_id"] for line in ended) == Counter(map(str, range(len(lines))))
    assert all(line["response"]["status_code"] < 500 for line in ended)
    return batch


def fuzz(server: Serving, folder: Path, ids: dict[str, str], *options: str, seed: int = 1, config: str = "") -> Tried:
    """One run of schemathesis, in `folder`, where it leaves its files. Its cases are those of the seed."""
    before = answers(server)
    environment = os.environ | ids | {"SCHEMATHESIS_HOOKS": "tests.processes.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    (folder / "schemathesis.toml").write_text(config)  # it looks there for one
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
