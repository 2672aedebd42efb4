"""The examples of the documentation are answered as shown: blocks followed by what they print are run as they stand.

Addresses are those of the server under test. What differs from run to run is left out: times, rates, and how many
samples had an answer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import toka_async.batches
from tests.cases.documentation import PAGES
from tests.processes.serving import Serving, free_port, serving

# A block, a line or a paragraph that ends with "prints …", and the block of what it prints.
EXAMPLE = re.compile(
    r"^```(sh|python)\n((?:(?!```).*\n)+)```\n\nprints(?:.*\n)+?\n```text\n((?:(?!```).*\n)+)```$", re.M
)
PREPARATION = re.compile(r"^cat > in\.jsonl <<'END'\n(?:.*\n)+?END\n", re.MULTILINE)
BATCH = re.compile(r"^toka-async batch run .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    language: str
    code: str
    prints: str


EXAMPLES = [Example(*found) for page in PAGES for found in EXAMPLE.findall(page.read_text(encoding="utf-8"))]


@dataclass(frozen=True, slots=True)
class Running:
    server: Serving
    zmq: str
    folder: Path

    def run(self, language: str, code: str) -> str:
        """What it prints."""
        code = code.replace("http://127.0.0.1:10210", self.server.url).replace("tcp://127.0.0.1:10211", self.zmq)
        code = code.replace("toka-async ping ", f"toka-async ping --url {self.server.url} ")
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder, zmq = tmp_path_factory.mktemp("readme"), f"tcp://127.0.0.1:{free_port()}"
    with serving(folder, f"zmq.bind={zmq}") as server:
        yield Running(server, zmq, folder)


def test_there_are_examples() -> None:
    text = " ".join(example.code for example in EXAMPLES)
    for each in ("ping", "/v1/completions", "OpenAI", "out.jsonl", "/chat/completions/batch", "toka_async.client"):
        assert each in text


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.code.split("\n", 1)[0][:40])
def test_an_example_prints_what_is_shown(running: Running, example: Example) -> None:
    if "out.jsonl" in example.code and not (running.folder / "out.jsonl").exists():
        prepare_batch(running)
    assert_alike(running.run(example.language, example.code), example.prints)


def prepare_batch(running: Running) -> None:
    """Runs the commands that make the files, of the page about batches."""
    guide = Path(toka_async.batches.__file__).with_name("README.md").read_text(encoding="utf-8")
    preparation, batch = PREPARATION.search(guide), BATCH.search(guide)
    assert preparation is not None
    assert batch is not None
    running.run("sh", f"{preparation[0]}\n{batch[0]}")


def assert_alike(printed: str, shown: str) -> None:
    """A line `…` stands for any others. Numbers of samples and of seconds may differ, and who else got votes."""
    head, dots, tail = (_lasting(part) for part in shown.partition("…\n"))
    lines = _lasting(printed)
    if not dots:
        assert lines == head
    else:
        assert lines[: len(head)] == head
        assert lines[-len(tail) :] == tail


def _lasting(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.startswith("others ")]
    lines = [re.sub(r"\d[\d,]* of", "N of", line) for line in lines]
    return [re.sub(r"[\d.,]+", "N", line) if line.startswith("speed ") else line for line in lines]
