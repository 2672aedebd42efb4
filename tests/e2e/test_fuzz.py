"""Whatever is sent to a server is answered: nothing is its own fault, and afterwards it serves as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.drawn import drawn
from tests.cases.lines import LINES
from tests.cases.wire_messages import SAID
from tests.processes.garbage import garbage
from tests.processes.http_fuzz import SMALL, fuzz, load, run_batch, seeded
from tests.processes.serving import Serving, free_port, serving
from toka_async.client import SyncClient

FEW = """
[phases]
examples.enabled = false
stateful.enabled = false

[[operations]]  # boundaries of every field; those of the first have the fields of the others
exclude-operation-id = ["createChatCompletion", "createChatCompletions", "generate", "generateTokens"]
phases.fuzzing.enabled = false

[[operations]]
include-operation-id = ["createChatCompletion", "createChatCompletions", "generate", "generateTokens"]
phases.coverage.enabled = false
generation.max-examples = 1
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, str]]:
    folder, url = tmp_path_factory.mktemp("fuzz"), f"tcp://127.0.0.1:{free_port()}"
    with serving(folder, *SMALL, f"server.data_dir={folder / 'data'}", f"zmq.bind={url}") as server:
        yield server, url
        assert "Traceback" not in server.said()
        assert "Content-Disposition" not in server.said()


def check_serves(server: Serving, url: str) -> None:
    """As if nothing had been; nothing of what was sent is left."""
    assert not load(server)["requests"]
    status, answer = server.post("/v1/completions", prompt="Question:", max_tokens=8, temperature=0, ignore_eos=True)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    with SyncClient(url) as client:
        result = client.generate("Question:", max_tokens=8, temperature=0, ignore_eos=True)
    assert result.samples[0].text == answer["choices"][0]["text"]


def test_http(running: tuple[Serving, str], tmp_path: Path) -> None:
    """Each status, media type and schema of an answer is one of the document's; wrong data is refused."""
    server, url = running
    tried = fuzz(server, tmp_path, seeded(server), config=FEW)
    assert tried.passed, tried.output
    assert tried.num_5xx == 0
    assert tried.num_cases > 800
    assert all(tried.statuses[path] for path in ("/v1/completions", "/v1/chat/completions", "/v1/files", "/v1/batches"))
    check_serves(server, url)


def test_direct_submission(running: tuple[Serving, str]) -> None:
    server, url = running
    with garbage(url) as client:
        for messages in drawn(SAID, 100):
            client.send(messages)
        assert client.num_messages > 300
    check_serves(server, url)


def test_lines_of_a_batch(running: tuple[Serving, str]) -> None:
    server, url = running
    lines = drawn(LINES, 150)
    batch = run_batch(server, lines)
    assert batch.request_counts is not None
    assert batch.request_counts.completed > 3
    assert batch.request_counts.failed > 30
    check_serves(server, url)
