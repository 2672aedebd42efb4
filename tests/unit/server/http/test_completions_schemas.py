"""Responses against the part of OpenAI's published API specification that describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.drivers.web_server import NAME, WebServer

SCHEMAS = json.loads((Path(__file__).parents[3] / "schemas" / "openai.json").read_text())
MESSAGES = [{"role": "user", "content": "the answer"}]
RICH = {"n": 2, "max_tokens": 30, "seed": 5, "stop": ["zz"]}


def check(name: str, value: Any) -> None:
    validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMAS["$defs"]})
    validator.validate(value)


@pytest.mark.parametrize("fields", [{}, RICH, RICH | {"logprobs": 3}, {"max_tokens": 0, "echo": True}])
async def test_completions(server: WebServer, fields: dict[str, Any]) -> None:
    check("CreateCompletionResponse", await server.ok("/v1/completions", {"prompt": ["the", "x"], **fields}))


async def test_the_last_chunk_of_a_completion(server: WebServer) -> None:
    """The specification has no chunks before the last: their finish_reason is null."""
    options = {"stream_options": {"include_usage": True}}
    *_, ended, usage = await server.events("/v1/completions", {"prompt": "the", "logprobs": 2, **options})
    check("CreateCompletionResponse", {name: value for name, value in ended.items() if name != "usage"})
    check("CreateCompletionResponse", usage)


@pytest.mark.parametrize("fields", [{}, RICH, RICH | {"logprobs": True}, {"logprobs": True, "top_logprobs": 4}])
async def test_chat(server: WebServer, fields: dict[str, Any]) -> None:
    check("CreateChatCompletionResponse", await server.ok("/v1/chat/completions", {"messages": MESSAGES, **fields}))


@pytest.mark.parametrize(
    "fields", [{}, RICH, {"logprobs": True, "top_logprobs": 2}, {"stream_options": {"include_usage": True}}]
)
async def test_chat_chunks(server: WebServer, fields: dict[str, Any]) -> None:
    events = await server.events("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, **fields})
    assert len(events) > 2
    for event in events:
        check("CreateChatCompletionStreamResponse", event)


async def test_models(server: WebServer) -> None:
    check("ListModelsResponse", (await server.get("/v1/models"))[1])
    check("Model", (await server.get(f"/v1/models/{NAME}"))[1])


async def test_errors(server: WebServer) -> None:
    check("ErrorResponse", (await server.get("/nowhere"))[1])
    check("ErrorResponse", (await server.post("/v1/completions", {"prompt": "x", "n": 0}))[1])


async def test_the_schemas_refuse_something() -> None:
    with pytest.raises(jsonschema.ValidationError):
        check("ErrorResponse", {"error": {"message": "x"}})
    with pytest.raises(jsonschema.ValidationError):
        check(
            "CreateChatCompletionStreamResponse", {"choices": [{}], "created": 1, "id": "", "model": "", "object": "x"}
        )
