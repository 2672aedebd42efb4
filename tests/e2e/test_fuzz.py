"""Whatever is sent to a server is answered: nothing is its own fault, and afterwards it serves as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http_fuzz import SMALL, fuzz, load, seeded
from tests.serving import Serving, serving

MANY = ("--exclude-operation-id=createChatCompletion", "--exclude-operation-id=createChatCompletions")
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("fuzz")
    with serving(folder, f"server.data_dir={folder / 'data'}", *SMALL) as running:
        yield running
        assert "Traceback" not in running.said()
        assert "Content-Disposition" not in running.said()


def check_serves(server: Serving) -> None:
    """As if nothing had been; nothing of what was sent is left."""
    assert not load(server)["requests"]
    status, answer = server.post("/v1/completions", prompt="Question:", max_tokens=8, temperature=0, ignore_eos=True)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)


@pytest.mark.parametrize(
    ("options", "least"),
    [(("--phases=coverage", *MANY), 500), (("--phases=fuzzing", "--max-examples=3"), 40)],
)
async def test_http(server: Serving, tmp_path_factory: pytest.TempPathFactory, options: list[str], least: int) -> None:
    """Each status, media type and schema of an answer is one of the document's; wrong data is refused."""
    tried = fuzz(server, tmp_path_factory.mktemp("run"), await seeded(server), *options)
    assert tried.passed, tried.output
    assert tried.num_5xx == 0
    assert tried.num_cases > least
    check_serves(server)
