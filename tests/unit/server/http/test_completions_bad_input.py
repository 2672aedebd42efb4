from __future__ import annotations

import asyncio
import gzip
import io
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import StreamReader

from tests.drivers.until import until
from tests.drivers.web_server import JSON, JSON_HEAD, NAME, WebServer, checked_error, web_server
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.server.generate import encoding, service
from toka_async.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server(max_n=64, max_requests=32, max_body_mb=1) as running:
        yield running
        assert not running.scheduler.log, "nothing of it reaches the engine"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("{", None),
        ("", None),
        ('{"prompt": "x", "temperature": NaN}', "temperature"),
        ('{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "\xff\xfe"}', None),
        ("[1]", None),
        ({"max_tokens": 1}, "prompt"),
        *[({"prompt": wrong}, "prompt") for wrong in ("", ["x", ""], ["x"] * 33, [5, 400], [-1], [5] * 513)],
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [5] * 10, "max_tokens": 503}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        *[({"top_p": wrong}, "top_p") for wrong in (0, 2)],
        *[({"n": wrong}, "n") for wrong in (0, 100_000, 10**1000)],
        ('{"prompt": "x", "n": 1' + "0" * 5000 + "}", None),
        ({"prompt": ["x"] * 20, "n": 5}, "n"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"logprobs": 1000}, "logprobs"),
        *[({"stop": wrong}, "stop") for wrong in (["x" + str(i) for i in range(10_000)], "")],
        *[({"logit_bias": wrong}, "logit_bias") for wrong in ({"400": 1}, {"a": 1})],
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"max_token": 5}, "max_token"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": {}, "regex": "a"}, "guided_json"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"seed": "x"}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_completions(server: WebServer, body: Any, param: str | None) -> None:
    if isinstance(body, dict) and param != "prompt":
        body = {"prompt": "x", **body}
    error = await server.error("/v1/completions", body)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        *[({"messages": wrong}, "messages") for wrong in ("hi", [{"role": "user", "content": "\u00e9" * 600}])],
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "cat", "content": "meow"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        *[({"max_tokens": wrong}, "max_tokens") for wrong in (0, 512)],
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
    ],
)
async def test_chat(server: WebServer, body: Any, param: str) -> None:
    body = body and {"messages": MESSAGES} | body
    assert (await server.error("/v1/chat/completions", body))["param"] == param


async def test_the_numbers_are_stated(server: WebServer) -> None:
    error = await server.error("/v1/completions", {"prompt": [5] * 10, "max_tokens": 600})
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("512", "610", "10 of the prompt", "600 of the completion"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_can_never_fit_is_not_even_tokenized(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    longest = max(map(len, server.tokenizer.pieces.rest.values()))
    text = "x" * (512 * longest + 1)
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": ["x", text]}
    error = await server.error(path, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages" if "chat" in path else "prompt")


async def test_nobody_waits_for_a_long_text(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, encode, asked = threading.Event(), Tokenizer.encode_batch, list[int]()

    def held(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        asked.append(len(texts[0]))
        assert len(texts[0]) <= 100 or go_on.wait(60)
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", held)
    monkeypatch.setattr(encoding, "LONG", 100)
    long = asyncio.create_task(server.ok("/tokenize", {"prompt": "x" * 101}))
    await until(lambda: asked == [101])
    assert (await server.ok("/tokenize", {"prompt": "x" * 100}))["count"] > 0
    assert not long.done()
    go_on.set()
    assert (await long)["count"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("character", ["x", "é"])
async def test_a_text_that_would_take_gigabytes_is_not_tokenized(
    monkeypatch: pytest.MonkeyPatch, path: str, character: str
) -> None:
    ready = msgspec.structs.replace(READY, max_context=1 << 22, num_pages=1 << 22)
    text = character * ((1 << 20) // len(character.encode()) + 1)
    async with web_server(FakeScheduler(ready=ready), max_text_mb=1) as server:
        monkeypatch.setattr(Tokenizer, "encode_batch", None)
        for is_chat in (True,) if "chat" in path else (False, True) if path == "/tokenize" else (False,):
            body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
            data, headers = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
            async with server.http.post(server.url + path, data=data, headers=headers) as response:
                assert response.status == 400
                error = checked_error(await response.json())
            assert (error["code"], error["param"]) == ("text_too_long", "messages" if is_chat else "prompt")
            assert "limits.max_text_mb" in error["message"]


async def test_a_text_that_does_not_fit_is_counted(server: WebServer) -> None:
    assert (await server.ok("/tokenize", {"prompt": "x " * 10_000}))["count"] > 512


async def test_chats_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_CHARS", 1000)
    template = "{{ system }}{% for m in messages %}{{ m.content }}{% endfor %}"
    async with web_server(template=template) as server:
        body = {"messages": [MESSAGES] * 9, "chat_template_kwargs": {"system": "x" * 100}, "max_tokens": 1}
        assert len((await server.ok("/v1/chat/completions/batch", body))["choices"]) == 9
        error = await server.error("/v1/chat/completions/batch", {**body, "messages": [MESSAGES] * 300})
        assert error["param"] == "messages"
        assert "1000 characters together" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_an_unknown_model(server: WebServer, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": MESSAGES},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
    }
    error = await server.error(path, {"model": "gpt-9", **bodies[path]}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_a_huge_body_is_not_read(server: WebServer) -> None:
    """The answer comes before the body does."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(JSON_HEAD + b"Content-Length: 104857600\r\n\r\n")
    status = await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    assert status.startswith(b"HTTP/1.1 413 ")


async def test_a_huge_body_after_a_question(server: WebServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = JSON_HEAD.decode() + "Content-Length: {}\r\nExpect: 100-continue\r\n\r\n"
    body = b'{"prompt": ""}'
    writer.write(head.format(len(body)).encode())
    assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
    writer.write(body)
    answer = await reader.readuntil(b"}}")
    assert b"HTTP/1.1 400 " in answer
    writer.write(head.format(104857600).encode())
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_huge_body_without_a_length(server: WebServer) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    async with server.http.post(server.url + "/v1/completions", data=chunks(), headers=JSON) as response:
        assert response.status == 413
        assert "max_body_mb" in checked_error(await response.json())["message"]


async def test_a_large_body_is_parsed_too(server: WebServer) -> None:
    """In a thread."""
    padding = " " * 1_040_000
    assert (await server.error("/v1/completions", padding + '{"prompt": "", "n": 0}'))["param"] == "n"


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("deflate", 415), ("br", 415), ("Identity", 400)])
async def test_an_encoding(server: WebServer, encoding: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """A client cannot fill the log with it."""
    headers = JSON | {"Content-Encoding": encoding}
    async with server.http.post(server.url + "/v1/completions", data=b"{}", headers=headers) as response:
        assert response.status == status
        checked_error(await response.json())
    await server.ok("/v1/completions", {"prompt": "x", "max_tokens": 1})
    server.scheduler.log.clear()
    assert not caplog.records


async def test_a_bomb(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body that is large once unpacked is not unpacked, also not while it is thrown away."""
    fed: list[int] = []
    feed = StreamReader.feed_data

    def counted(self: StreamReader, data: bytes, *_: int) -> bool:
        fed.append(len(data))
        return feed(self, data)

    monkeypatch.setattr(StreamReader, "feed_data", counted)
    data, headers = gzip.compress(b" " * 20_000_000), JSON | {"Content-Encoding": "gzip"}
    async with server.http.post(server.url + "/v1/completions", data=data, headers=headers) as response:
        assert response.status == 415
        checked_error(await response.json())
    assert sum(fed) < 2 * len(data)


async def test_a_model_name_that_is_fine(server: WebServer) -> None:
    """Guards the tests above against errors of another cause."""
    answer = await server.ok("/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": 1})
    assert len(answer["choices"]) == 1
    server.scheduler.log.clear()
