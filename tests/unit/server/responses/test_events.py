from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.cases.tool_calls import FORMATS, Answer, write_answer
from tests.drivers.answering import ANSWER, CALL, answering
from tests.drivers.until import until
from tests.drivers.web_server import NAME, WebServer
from toka_async.messages import Failed

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "time", "parameters": None, "strict": None},
]
END = (".completed", ".incomplete", ".failed")
PART = ["response.content_part.added", "response.content_part.done"]
SUMMARY = ["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]


async def stream(server: WebServer, **fields: Any) -> list[dict[str, Any]]:
    """The events, each of which is one of the client's, with its number."""
    events = await server.events(PATH, {"input": "hi", **fields})
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert EVENT.validate_python(event).type == event["type"]
    return events


def types(events: Sequence[dict[str, Any]]) -> list[str]:
    """The events' types, those of successive deltas once."""
    found = [event["type"] for event in events]
    return [each for place, each in enumerate(found) if place == 0 or each != found[place - 1]]


def item(*inside: str) -> list[str]:
    return ["response.output_item.added", *inside, "response.output_item.done"]


ARGUMENTS = item("response.function_call_arguments.delta", "response.function_call_arguments.done")
TEXT = item(PART[0], "response.output_text.delta", "response.output_text.done", PART[1])
THOUGHT = item(PART[0], "response.reasoning_text.delta", "response.reasoning_text.done", PART[1])
SUMMED = item(SUMMARY[0], "response.reasoning_summary_text.delta", "response.reasoning_summary_text.done", SUMMARY[1])


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_the_order(summary: str | None) -> None:
    async with answering(ANSWER) as server:
        events = await stream(server, tools=TOOLS, reasoning={"summary": summary})
    assert types(events) == [
        *("response.created", "response.in_progress"),
        *(SUMMED if summary else THOUGHT),
        *TEXT,
        *ARGUMENTS,
        *ARGUMENTS,
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices)
    ids = {(event["output_index"], event["item_id"]) for event in events if "item_id" in event}
    assert len(ids) == 4


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [
        {name: value for name, value in each.items() if name not in ("id", "call_id")} for each in response["output"]
    ]
    return {**response, "output": items, "id": "", "created_at": 0, "completed_at": 0, "usage": None}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        {"stop": ["look"]},
        {"stop": ["look"], "include": ["message.output_text.logprobs"]},
        {"max_output_tokens": 40},
        {"reasoning": {"summary": "detailed"}},
    ],
)
@pytest.mark.parametrize("text", [f"{ANSWER}\nAnd {CALL} so", "plain é text", ""])
async def test_a_stream_says_what_the_whole_response_does(text: str, fields: dict[str, Any]) -> None:
    async with answering(text) as server:
        whole = await server.ok(PATH, {"input": "hi", "tools": TOOLS, **fields})
        events = await stream(server, tools=TOOLS, **fields)
    last = events[-1]["response"]
    assert without_ids(last) == without_ids(whole)
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert last["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    said: dict[str, str] = {}
    logged: dict[str, list[Any]] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            said[event["item_id"]] = said.get(event["item_id"], "") + event["delta"]
            logged.setdefault(event["item_id"], []).extend(event.get("logprobs", ()))
    for each in done:
        parts = each.get("content") or each.get("summary") or ()
        assert said.get(each["id"], "") == each.get("arguments", "".join(part["text"] for part in parts))
        assert logged.get(each["id"], []) == [one for part in parts for one in part.get("logprobs", ())]


ENDS = {"completed": "response.completed", "incomplete": "response.incomplete"}


@pytest.mark.parametrize("name", FORMATS)
async def test_streams_have_one_end_wherever_they_are_cut_off(name: str) -> None:
    """And their last item is complete where they are."""
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
    text = write_answer(name, Answer(calls=[("f", {"a": "xy"}), ("f", {})]))
    formats: dict[str, Any] = {"tool_format": name.removesuffix("_named"), "reasoning_format": "none"}
    async with answering(text, **formats) as server:
        size, ends = len(server.tokenizer.encode(text, False)), []
        for most in (*range(1, size, 3), size, size + 1):
            events = await stream(server, tools=tools, max_output_tokens=most)
            last = events[-1]["response"]
            assert [event["type"] for event in events if event["type"].endswith(END)] == [ENDS[last["status"]]]
            assert [item["status"] for item in last["output"]][-1] == last["status"]
            assert all(item["status"] == "completed" for item in last["output"][:-1])
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert done == last["output"]
            ends.append(last["status"])
    assert ends == ["incomplete"] * (len(ends) - 1) + ["completed"]
    assert [item["type"] for item in last["output"]] == ["function_call"] * 2


async def test_the_clients_own_accumulation() -> None:
    async with answering() as server:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        async with client, client.responses.stream(model=NAME, input="hi", tools=TOOLS) as stream:
            async for _ in stream:
                pass
            answer = await stream.get_final_response()
    assert answer.output_text == "I look."
    assert [item.name for item in answer.output if item.type == "function_call"] == ["weather", "time"]


async def test_padding() -> None:
    async with answering("plain") as server:
        events = await stream(server, stream_options={"include_obfuscation": True})
    deltas = [event for event in events if event["type"].endswith(".delta")]
    assert deltas
    assert all((len(event["delta"].encode()) + 2 + len(event["obfuscation"])) % 32 == 0 for event in deltas)
    assert not any("obfuscation" in event for event in events if event not in deltas)


@asynccontextmanager
async def begun(server: WebServer) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream whose first events have come; its request goes on by `step` alone."""
    scheduler = server.scheduler
    scheduler.held = True
    asked = asyncio.create_task(server.http.post(server.url + PATH, json={"input": "hi", "stream": True}))
    await until(lambda: server.engine.num_requests)
    scheduler.step()
    async with await asked as response:
        assert await response.content.readline() == b"event: response.created\n"
        yield response


async def test_a_failure_is_an_event() -> None:
    async with answering("x" * 300) as server, begun(server) as response:
        server.engine.on_messages([Failed(request_id=min(server.scheduler.requests), message="too long")])
        *_, name, data = (await response.text()).rstrip("\n").split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed"
    assert EVENT.validate_python(event).response.error.message == "too long"
    assert event["response"]["status"] == "failed"
    assert [item["status"] for item in event["response"]["output"]] == ["incomplete"]


async def test_who_leaves_cancels() -> None:
    async with answering("x" * 300) as server:
        async with begun(server) as response:
            response.close()
            await until(lambda: not server.engine.num_requests)
        server.scheduler.step()
        assert not server.scheduler.requests
