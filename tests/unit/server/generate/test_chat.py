from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.cases.tokenizers import byte_level
from tests.drivers.web_server import NAME, WebServer, web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.arrays import as_i32

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": "what"}]


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    ids = byte_level().encode(" the answer 你好")
    end = byte_level().eos_token_id
    assert end is not None
    async with web_server(FakeScheduler(lambda submit, _sample: [*ids, end] * submit.max_tokens)) as running:
        yield running


def prompts(server: WebServer) -> list[str]:
    return [
        server.tokenizer.decode(as_i32(message.prompt).tolist(), skip_special_tokens=False)
        for message in server.scheduler.submits
    ]


async def test_a_chat(server: WebServer) -> None:
    answer = await server.ok(PATH, {"model": NAME, "messages": MESSAGES})
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": " the answer 你好", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert prompts(server) == ["<system>be\n<user>what\n<assistant>"]
    assert answer["usage"]["prompt_tokens"] == len(server.tokenizer.encode("<system>be\n<user>what\n<assistant>"))


async def test_the_rest_of_the_context_is_the_default(server: WebServer) -> None:
    answer = await server.ok(PATH, {"messages": MESSAGES, "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == 512
    limited = await server.ok(PATH, {"messages": MESSAGES, "ignore_eos": True, "max_completion_tokens": 3})
    assert limited["usage"]["completion_tokens"] == 3
    assert limited["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"add_generation_prompt": False}, "<system>be\n<user>what\n"),
        ({"continue_final_message": True}, "<system>be\n<user>what"),
        ({"add_special_tokens": False}, "<system>be\n<user>what\n<assistant>"),
    ],
)
async def test_ways_to_render(server: WebServer, fields: dict[str, Any], prompt: str) -> None:
    await server.ok(PATH, {"messages": MESSAGES, **fields})
    assert prompts(server) == [prompt]


async def test_template_arguments() -> None:
    async with web_server(template="{{ messages[0].content }}{{ mood }}{{ 1 / (zero or 1) }}") as server:
        body = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": {"mood": "good"}}
        await server.ok(PATH, body)
        assert prompts(server) == ["begood1.0"]


async def test_a_template_that_refuses() -> None:
    async with web_server(template="{{ raise_exception('roles must alternate') }}") as server:
        error = await server.error(PATH, {"messages": MESSAGES})
        assert error["param"] == "messages"
        assert "roles must alternate" in error["message"]


async def test_no_template() -> None:
    async with web_server(template=None) as server:
        assert "no chat template" in (await server.error(PATH, {"messages": MESSAGES}))["message"]
        assert await server.ok("/v1/completions", {"prompt": "x"})


async def test_logprobs(server: WebServer) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 100, "return_token_ids": True}
    (choice,) = (await server.ok(PATH, body))["choices"]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(content) == len(choice["token_ids"])
    raw = b"".join(bytes(entry["bytes"]) for entry in content[:-1])  # the last is the end token
    assert raw.decode() == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[-1]["token"] == "</s>"
    bare = await server.ok(PATH, {"messages": MESSAGES, "logprobs": True, "max_tokens": 3})
    assert [entry["top_logprobs"] for entry in bare["choices"][0]["logprobs"]["content"]] == [[], [], []]


async def test_prompt_logprobs(server: WebServer) -> None:
    answer = await server.ok(PATH, {"messages": MESSAGES, "prompt_logprobs": 0, "max_tokens": 1})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


async def test_a_stream(server: WebServer) -> None:
    body = {"messages": MESSAGES, "n": 2, "stream_options": {"include_usage": True}, "logprobs": True}
    events = await server.events(PATH, body)
    *chunks, last = events
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert all(event["usage"] is None for event in chunks)
    assert last["choices"] == []
    whole = await server.ok(PATH, {"messages": MESSAGES, "n": 2, "logprobs": True})
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in chunks if event["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["stop"]
        shown = [entry for each in mine if each["logprobs"] for entry in each["logprobs"]["content"]]
        assert shown == choice["logprobs"]["content"]


async def test_without_usage(server: WebServer) -> None:
    assert all("usage" not in event for event in await server.events(PATH, {"messages": MESSAGES}))


async def test_tokenize_as_chat(server: WebServer) -> None:
    answer = await server.ok("/tokenize", {"messages": MESSAGES})
    assert answer["tokens"] == server.tokenizer.encode("<system>be\n<user>what\n<assistant>")
    bare = await server.ok("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert bare["count"] < answer["count"]


async def test_token_ids_of_the_prompt(server: WebServer) -> None:
    body = {"messages": MESSAGES, "n": 2, "max_tokens": 3, "return_token_ids": True}
    answer = await server.ok(PATH, body)
    (submit,) = server.scheduler.submits
    assert answer["prompt_token_ids"] == as_i32(submit.prompt).tolist()
    first, *rest = await server.events(PATH, {**body, "n": 1})
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_token_ids" in event for event in rest)


async def test_usage_in_every_chunk(server: WebServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}}
    events = await server.events(PATH, body)
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3]


async def test_template_arguments_by_their_other_name() -> None:
    async with web_server(template="{{ messages[0].content }}{{ mood }}") as server:
        body = {"messages": MESSAGES, "max_tokens": 1, "apply_chat_template_overrides": {"mood": "good"}}
        await server.ok(PATH, body)
        assert prompts(server) == ["begood"]
        error = await server.error(PATH, {**body, "chat_template_kwargs": {"mood": "bad"}})
        assert error["param"] == "apply_chat_template_overrides"


async def test_fields_of_others_that_ask_for_nothing(server: WebServer) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "echo": False,
        "best_of": 1,
        "top_logprobs": 0,
        "spaces_between_special_tokens": True,
        "apply_chat_template_overrides": {},
        "reasoning_effort": "none",
        "verbosity": "medium",
    }
    assert await server.ok(PATH, {"messages": MESSAGES, "max_tokens": 1, **neutral})


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("n", [1, 5])
async def test_packed_logprobs(server: WebServer, n: int, num_top: int) -> None:
    """As Tokasaurus' clients read them."""
    body = {"messages": MESSAGES, "n": n, "max_tokens": 3, "seed": 1, "logprobs": True, "top_logprobs": num_top}
    plain = await server.ok(PATH, {**body, "return_token_ids": True})
    answer = await server.ok(PATH, {**body, "logprobs_in_fingerprint": True})
    packed = json.loads(answer["system_fingerprint"])
    assert "system_fingerprint" not in plain
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert packed["completion_ids"] == [choice["token_ids"] for choice in plain["choices"]]
    for i, choice in enumerate(plain["choices"]):
        content = choice["logprobs"]["content"]
        chosen = np.frombuffer(base64.b64decode(packed["packed_chosen_logprobs"][i]), np.float32)
        assert chosen.tolist() == [token["logprob"] for token in content]
        if num_top:
            top = np.frombuffer(base64.b64decode(packed["packed_topk_logprobs"][i]), np.float32).reshape(-1, num_top)
            assert top.tolist() == [[each["logprob"] for each in token["top_logprobs"]] for token in content]
            ids = np.frombuffer(base64.b64decode(packed["packed_topk_indices"][i]), np.int32)
            assert ids.size == len(content) * num_top
        else:
            assert packed["packed_topk_logprobs"] is None


async def test_packed_logprobs_are_of_whole_answers(server: WebServer) -> None:
    error = await server.error(PATH, {"messages": MESSAGES, "stream": True, "logprobs_in_fingerprint": True})
    assert error["param"] == "logprobs_in_fingerprint"
    alone = await server.ok(PATH, {"messages": MESSAGES, "max_tokens": 1, "logprobs_in_fingerprint": True})
    assert len(json.loads(alone["system_fingerprint"])["packed_chosen_logprobs"]) == 1
    body = {"prompt": "x", "max_tokens": 2, "echo": True, "logprobs": 1, "logprobs_in_fingerprint": True}
    answer = await server.ok("/v1/completions", body)
    assert answer["choices"][0]["text"].startswith("x")
    assert len(json.loads(answer["system_fingerprint"])["completion_ids"][0]) == 2
