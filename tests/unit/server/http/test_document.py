from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, get_args

import aiohttp
import jsonschema
import pytest
import schemathesis

import toka_async.server
from tests.drivers.web_server import NAME, WebServer, checked_error, web_server
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.batches import records
from toka_async.openai import batches
from toka_async.openai.requests import (
    ChatBatchRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    WireRequest,
)
from toka_async.server.access.keys import Key, Keys, digest_key
from toka_async.server.http.document import strip_patterns
from toka_async.server.http.routes import ROUTES, Routes
from toka_async.server.page.page import STATE
from toka_async.server.responses.requests import (
    OfferedFunction,
    ReasoningConfig,
    ResponsesRequest,
    ResponseStreamOptions,
    TextConfig,
)
from toka_async.server.sglang import routes as sglang
from toka_async.server.sglang.control import SglangAbort, SglangPause
from toka_async.server.sglang.requests import SglangRequest, SglangSampling
from toka_async.server.sglang.weights import DiskRequest, DistributedRequest, GroupRequest, TagsRequest, TensorRequest
from toka_async.server.vllm import routes as vllm
from toka_async.server.vllm.control import AbortRequest
from toka_async.server.vllm.requests import TokensRequest, VllmSampling
from toka_async.server.vllm.weights import (
    CheckRequest,
    FinishRequest,
    RpcRequest,
    SharedGpu,
    SharedGpus,
    SharedMemory,
    TransferInfo,
    UpdateInfo,
    UpdateRequest,
    VersionRequest,
)

KEY = "sk-alice-0123456"
KEYS = Keys((Key(digest_key(KEY), "alice"),))
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server(max_n=8) as running:
        yield running


@pytest.fixture
async def document(server: WebServer) -> dict[str, Any]:
    status, made = await server.get("/openapi.json")
    assert status == 200
    described: dict[str, Any] = made
    return described


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def is_valid(document: dict[str, Any], schema: dict[str, Any], value: object) -> bool:
    root = {**schema, "components": document["components"]}
    valid: bool = jsonschema.Draft202012Validator(root).is_valid(value)
    return valid


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    schema: dict[str, Any] = content["schema"]
    return schema


async def test_it_is_openapi(document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()
    assert document["openapi"] == "3.1.0"


async def test_routes_and_document_are_the_same(server: WebServer, document: dict[str, Any]) -> None:
    routed = {
        (route.method, strip_patterns(route.resource.canonical))
        for route in server.app.router.routes()
        if route.resource is not None and route.method != "HEAD"  # a GET's own
    }
    assert {(method, path) for method, path, _ in operations(document)} == routed


async def test_every_operation_has_a_name_of_its_own_and_every_error_a_schema(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    for _, _, operation in operations(document):
        for status, response in operation["responses"].items():
            if "$ref" in response:
                assert response["$ref"].removeprefix("#/components/responses/") == status
                assert status in document["components"]["responses"]


async def test_the_limits_are_the_models(document: dict[str, Any]) -> None:
    schema = body_schema(document, "/v1/completions")
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["model"] == {"enum": [NAME, "", "default", "none", None]}
    for good, bad in (
        ({"n": 8}, {"n": 9}),
        ({"max_tokens": 512}, {"max_tokens": 513}),
        ({"stop_token_ids": [399]}, {"stop_token_ids": [400]}),
        ({"prompt": [[399]]}, {"prompt": [[400]]}),
        ({"prompt": ["a", "b"]}, {"prompt": ["a", 1]}),
        ({"stop": "x"}, {"stop": ""}),
        ({"temperature": None}, {"temperature": 3}),
        ({"store": False}, {"store": True}),
        ({"logit_bias": {"5": 1}}, {"logit_bias": {"a": 1}}),
        ({}, {"prompt": None}),
        ({}, {"nonsense": 1}),
    ):
        assert is_valid(document, schema, {"prompt": "x"} | good), good
        assert not is_valid(document, schema, {"prompt": "x"} | bad), bad


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, {"messages": [CHAT]}),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True}, {"messages": []}),
        ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT]}, {"messages": CHAT}),
        ("/v1/chat/completions/batch", {"messages": [CHAT], "stream": False}, {"messages": [CHAT], "stream": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 9}, {"input": []}),
        ("/v1/responses", {"input": [{"role": "user", "content": "x", "id": None}]}, {"input": [{"type": "mcp_call"}]}),
        ("/v1/responses", {"input": CHAT, "store": False}, {"input": CHAT, "conversation": "c"}),
        ("/v1/responses", {"input": "x", "tool_choice": "auto"}, {"input": "x", "tool_choice": {"type": "function"}}),
        ("/inference/v1/generate", {"token_ids": [399], "sampling_params": {}}, {"token_ids": [5]}),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"output_kind": 2, "stop": None}},
            {"token_ids": [5], "sampling_params": {"stop_token_ids": [400]}},
        ),
        ("/generate", {"input_ids": [399]}, {"input_ids": [400]}),
        ("/generate", {"input_ids": [[5]], "sampling_params": [{"regex": ""}]}, {"input_ids": [[5]], "rid": 5}),
        ("/generate", {"text": ["a", "b"]}, {"text": ["a"], "sampling_params": [{"regex": 5}]}),
        ("/tokenize", {"prompt": "x"}, {"prompt": 5}),
        ("/detokenize", {"tokens": [399]}, {"tokens": [400]}),
    ],
)
async def test_bodies(server: WebServer, document: dict[str, Any], path: str, good: Any, bad: Any) -> None:
    """The schema takes what the server takes."""
    schema = body_schema(document, path)
    assert is_valid(document, schema, good)
    assert not is_valid(document, schema, bad)
    async with server.http.post(server.url + path, json=good) as response:
        assert response.status == 200
    await server.error(path, bad)


EVENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # a whole answer's body, and what a stream's has besides
    "/v1/completions": ({"prompt": "x"}, {"logprobs": 1, "n": 2, "max_tokens": 4}),
    "/v1/chat/completions": ({"messages": CHAT}, {"logprobs": True, "n": 2, "max_tokens": 4}),
    "/v1/responses": ({"input": "x"}, {"include": ["message.output_text.logprobs"], "max_output_tokens": 4}),
    "/inference/v1/generate": (
        {"token_ids": [5, 6], "sampling_params": {"n": 2, "logprobs": 1, "max_tokens": 4}},
        {"return_token_ids": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
    ),
    "/generate": ({"input_ids": [5, 6], "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}, {}),
}


@pytest.mark.parametrize("path", EVENTS)
async def test_events(server: WebServer, document: dict[str, Any], path: str) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    assert data[0] == {"const": "[DONE]"}
    body, more = EVENTS[path]
    events = await server.events(path, body | more)
    for event in events:
        assert is_valid(document, data[1]["contentSchema"], event)
    assert not is_valid(document, data[1]["contentSchema"], {})
    whole = await server.ok(path, body)
    assert is_valid(document, content["application/json"]["schema"], whole)


async def test_small_answers(server: WebServer, document: dict[str, Any]) -> None:
    infos = ("/get_world_size", "/weight_info", "/is_paused", "/server_info", "/tokenizer_info", "/model_info")
    more = ("/get_weight_version", "/v1/loads")
    for path in ("/v1/models", "/health", "/ping", "/load", "/version", STATE, *infos, *more):
        schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        _, answer = await server.get(path)
        assert is_valid(document, schema, answer)
        assert not is_valid(document, schema, {})


def test_the_statuses_of_a_batch_are_those_that_are_kept() -> None:
    assert set(get_args(batches.Status)) == set(get_args(records.Status))


async def test_keys() -> None:
    async with web_server(keys=KEYS, open_metrics=True) as server:
        async with server.http.get(server.url + "/openapi.json") as response:
            assert response.status == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as http, http.get(server.url + "/openapi.json") as response:
            document = await response.json()
    schemathesis.openapi.from_dict(document).validate()
    assert document["security"] == [{"key": []}, {"header": []}]
    assert document["components"]["securitySchemes"].keys() == {"key", "header"}
    for _, path, operation in operations(document):
        is_file = path == "/" or (path.startswith("/page/") and path != STATE)
        is_open = is_file or path in ("/health", "/ping", "/metrics")
        assert operation.get("security") == ([] if is_open else None)
        assert ("401" in operation["responses"]) != is_open


async def test_without_keys_there_is_no_security(document: dict[str, Any]) -> None:
    assert "security" not in document
    assert not any("401" in operation["responses"] for _, _, operation in operations(document))


async def test_it_needs_to_know_the_model() -> None:
    async with web_server(FakeScheduler(ready=None)) as server:
        status, answer = await server.get("/openapi.json")
        assert status == 503
        checked_error(answer)
        server.engine.on_messages([READY])
        assert (await server.get("/openapi.json"))[0] == 200


def test_the_guide_names_every_route_and_field() -> None:
    structs = (CompletionRequest, ChatBatchRequest, TokenizeRequest, DetokenizeRequest, StreamOptions)
    check_guide("API.md", ROUTES, *structs)


def test_the_guide_to_responses_names_every_field() -> None:
    structs = (ResponsesRequest, TextConfig, ReasoningConfig, ResponseStreamOptions, OfferedFunction)
    check_guide("RESPONSES.md", {}, *structs)


def test_the_guide_for_trainers_names_every_route_and_field() -> None:
    structs: tuple[type[WireRequest], ...]
    structs = (TokensRequest, VllmSampling, SglangRequest, SglangSampling, TransferInfo, UpdateInfo, UpdateRequest)
    structs += (SharedMemory, SharedGpu, SharedGpus, FinishRequest, VersionRequest, CheckRequest, RpcRequest)
    structs += (GroupRequest, DistributedRequest, DiskRequest, AbortRequest, SglangPause, SglangAbort, TagsRequest)
    structs += (TensorRequest,)
    routes = vllm.ROUTES | sglang.ROUTES | vllm.ADMIN_ROUTES | sglang.ADMIN_ROUTES
    check_guide("TRAINING.md", routes, *structs)


def check_guide(name: str, described: Routes, *structs: type[WireRequest]) -> None:
    guide = Path(toka_async.server.__file__).with_name(name).read_text(encoding="utf-8")
    fields = {field for struct in structs for field in struct.__struct_fields__}
    routes = {f"{method} {strip_patterns(path)}" for method, path in described}
    assert [name for name in sorted(fields | routes) if f"`{name}`" not in guide] == []
