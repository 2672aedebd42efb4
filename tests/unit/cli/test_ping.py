from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.processes.certificates import make_certificate
from toka_async.cli.ping import PingError, PingQuestion, Server

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
        assert list(Server(server.url).stream(PingQuestion(prompt="why"))) == ["a", "é"]
        path, asked = server.asked[0]
    assert path == "/v1/completions"
    assert asked == {"model": "m", "stream": True, "prompt": "why", "max_tokens": 256}


def test_a_chat() -> None:
    body = events({"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "yes"}}]})
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    question = PingQuestion(messages=messages, max_tokens=3, temperature=0.0, top_p=0.5, seed=7, model="other")
    with answering(body) as server:
        assert "".join(Server(server.url + "/v1/").stream(question)) == "yes"
        path, asked = server.asked[0]
    assert path == "/v1/chat/completions"
    assert asked == {
        "model": "other",
        "stream": True,
        "messages": messages,
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 7,
    }


@pytest.mark.parametrize("chat", [False, True])
def test_many_samples(chat: bool) -> None:
    choices = [{"message": {"content": text}} if chat else {"text": text} for text in ("a", "b")]
    body = json.dumps({"choices": choices, "usage": {"completion_tokens": 9}}).encode()
    question = PingQuestion(prompt="x", messages=[{"role": "user", "content": "x"}] if chat else (), n=2)
    with answering(body) as server:
        samples = Server(server.url).ask_samples(question)
        (_, asked) = server.asked[0]
    assert (samples.texts, samples.num_tokens) == (["a", "b"], 9)
    assert samples.seconds > 0
    assert asked["n"] == 2
    assert "stream" not in asked


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error":{"message":"the prompt is empty"}}', "400 the prompt is empty"),
        (502, b"<html>", "502 Bad Gateway"),
        (401, b"{}", "it needs an API key; set TOKA_API_KEY in the environment"),
        (200, events({"error": {"message": "the engine has stopped"}}), "the engine has stopped"),
        (200, b"data: {not json\n\n", "does not answer like an OpenAI server"),
        (200, b"data: {}\n\n", "does not answer like an OpenAI server"),
        (200, events({"choices": [{"text": 5}]}), "does not answer like an OpenAI server"),
        (200, b"data: " + b"[" * 100_000 + b"\n\n", "does not answer like an OpenAI server"),
    ],
)
def test_errors_are_one_line(status: int, body: bytes, message: str) -> None:
    with answering(body, status) as server, pytest.raises(PingError, match=message) as caught:
        ask(server.url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("choices", [[], [{"text": 5}], 3])
def test_samples_that_are_none_are_an_error(choices: object) -> None:
    body = json.dumps({"choices": choices, "usage": {"completion_tokens": 9}}).encode()
    with answering(body) as server, pytest.raises(PingError, match="does not answer like an OpenAI server"):
        Server(server.url).ask_samples(PingQuestion(prompt="x", n=2))


def test_half_a_character_can_be_printed() -> None:
    """Servers that cut texts in UTF-16 send such pieces."""
    with answering(events({"choices": [{"text": "a\ud83d"}]})) as server:
        assert ask(server.url) == ["a?"]


def test_a_wrong_key() -> None:
    with answering(b"{}", 401) as server, pytest.raises(PingError, match="the key in TOKA_API_KEY is not one of"):
        ask(server.url, key="wrong")


@pytest.mark.parametrize("models", [b"hello", b"[]", b'{"data": []}'])
def test_something_else_listens(models: bytes) -> None:
    with answering(b"", models=models) as server, pytest.raises(PingError, match="like an OpenAI server"):
        ask(server.url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "nothing listens there; start a server with `toka-async serve`"),
        ("127.0.0.1:1", "nothing listens there"),
        ("http://host.invalid", "unknown host"),
        ("http://127.0.0.1:x", "expected a URL"),
        ("http://", "expected a URL"),
        ("", "expected a URL"),
    ],
)
def test_no_server(url: str, message: str) -> None:
    with pytest.raises(PingError, match=message):
        ask(url)


def test_a_certificate_that_nobody_signed(tmp_path: Path) -> None:
    """Python's own TLS server: it ends the connection when the client does not trust it."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with answering(b"") as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with pytest.raises(PingError, match=r"not trusted .* set SSL_CERT_FILE"):
            ask(server.url.replace("http:", "https:"))


def test_no_tls_there() -> None:
    with answering(b"") as server, pytest.raises(PingError, match="does not speak TLS"):
        ask(server.url.replace("http:", "https:"))


def ask(url: str, key: str = "") -> list[str]:
    return list(Server(url, key).stream(PingQuestion(prompt="why")))
