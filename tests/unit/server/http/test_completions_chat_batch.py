from __future__ import annotations

from typing import Any

import pytest

from tests.drivers.web_server import web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.arrays import as_i32
from toka_async.messages import Ready

PATH = "/v1/chat/completions/batch"
HI = [{"role": "user", "content": "hi"}]
LARGE = Ready(num_pages=1 << 20, page_size=16, max_seqs=8192, max_context=512, vocab_size=400)


async def test_a_choice_for_each_conversation_and_sample() -> None:
    async with web_server() as server:
        messages = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
        answer = await server.ok(PATH, {"messages": messages, "n": 2, "max_tokens": 3, "seed": 5})
        assert answer["object"] == "chat.completion"
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["completion_tokens"] == 18
        single = await server.ok("/v1/chat/completions", {"messages": messages[0], "n": 2, "max_tokens": 3, "seed": 5})
        assert answer["choices"][:2] == single["choices"]


async def test_token_ids_of_each_prompt() -> None:
    """There are several prompts, so each choice has its own."""
    async with web_server() as server:
        messages = [[{"role": "user", "content": text}] for text in ("a", "b")]
        answer = await server.ok(PATH, {"messages": messages, "n": 2, "max_tokens": 1, "return_token_ids": True})
        prompts = [as_i32(message.prompt).tolist() for message in server.scheduler.submits]
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [each for each in prompts for _ in "nn"]
        assert "prompt_token_ids" not in answer


async def test_a_thousand_in_one_connection() -> None:
    async with web_server(FakeScheduler(ready=LARGE)) as server:
        answer = await server.ok(PATH, {"messages": [HI] * 1024, "max_tokens": 1})
        assert len(answer["choices"]) == 1024
        answer = await server.ok("/v1/completions", {"prompt": ["hi"] * 1024, "max_tokens": 1})
        assert [choice["index"] for choice in answer["choices"]] == list(range(1024))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HI}, "messages[0]"),
        ({"messages": [HI, []]}, "messages[1]"),
        ({"messages": [HI, [{"role": "nobody", "content": ""}]]}, "messages[1][0].role"),
        ({"messages": [HI], "stream": True}, "stream"),
        ({"messages": [HI], "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"messages": [HI] * 2, "n": 5}, "n"),
        ({"messages": [HI] * 9}, "messages"),
        ({}, "messages"),
    ],
)
async def test_wrong_requests(body: dict[str, Any], param: str) -> None:
    async with web_server(max_requests=8, max_n=8) as server:
        assert (await server.error(PATH, body))["param"] == param
