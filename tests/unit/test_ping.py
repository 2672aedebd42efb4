"""`ping` against a small HTTP server that answers as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from toka_async.ping import PingError, ping

MODELS = {"object": "list", "data": [{"id": "m"}]}


class Answering(HTTPServer):
    """Answers GET with `models`, POST with `body` after recording the question."""

    def __init__(self, body: bytes, status: int = 200, models: bytes | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.status, self.models = body, status, models or json.dumps(MODELS).encode()
        self.asked: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self._send(200, self.server.models)

    def do_POST(self) -> None:
        self.server.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self._send(self.server.status, self.server.body)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextmanager
def answering(body: bytes, status: int = 200, models: bytes | None = None) -> Iterator[Answering]:
    server = Answering(body, status, models)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(*values: object) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values) + b"data: [DONE]\n\n"


def test_a_completion() -> None:
    body = events({"choices": [{"text": "a"}]}, {"choices": [{"text": "é"}]}, {"choices": []})
    with answering(body) as server:
        assert list(ping(server.url, "why")) == ["a", "é"]
        path, asked = server.asked[0]
    assert path == "/v1/completions"
    assert asked == {"model": "m", "stream": True, "prompt": "why", "max_tokens": 256}


def test_a_chat() -> None:
    body = events({"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "yes"}}]})
    with answering(body) as server:
        assert "".join(ping(server.url + "/v1/", "why", chat=True, max_tokens=3)) == "yes"
        path, asked = server.asked[0]
    assert path == "/v1/chat/completions"
    assert asked == {"model": "m", "stream": True, "messages": [{"role": "user", "content": "why"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error":{"message":"the prompt is empty"}}', "400 the prompt is empty"),
        (502, b"<html>", "502 Bad Gateway"),
        (200, events({"error": {"message": "the engine has stopped"}}), "the engine has stopped"),
        (200, b"data: {not json\n\n", "does not answer like an OpenAI server"),
        (200, b"data: {}\n\n", "does not answer like an OpenAI server"),
    ],
)
def test_errors_are_one_line(status: int, body: bytes, message: str) -> None:
    with answering(body, status) as server, pytest.raises(PingError, match=message) as caught:
        list(ping(server.url, "why"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("models", [b"hello", b"[]", b'{"data": []}'])
def test_something_else_listens(models: bytes) -> None:
    with answering(b"", models=models) as server, pytest.raises(PingError, match="like an OpenAI server"):
        list(ping(server.url, "why"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "nothing listens there"),
        ("127.0.0.1:1", "nothing listens there"),
        ("http://host.invalid", "unknown host"),
        ("http://127.0.0.1:x", "expected a URL"),
        ("http://", "expected a URL"),
        ("", "expected a URL"),
    ],
)
def test_no_server(url: str, message: str) -> None:
    with pytest.raises(PingError, match=message):
        list(ping(url, "why"))
