"""A client of one running server, for people at a terminal: an answer as it streams, or many samples at once.

Uses the standard library only, so that it starts at once.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

TIMEOUT = 600.0  # seconds without a byte
MAX_TOKENS = 256  # for a completion; the API's own default is 16

Message = dict[str, str]  # role and content


class PingError(Exception):
    """The server cannot be reached or did not answer; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PingQuestion:
    """A question: a text to complete, or the messages of a chat. None: the server's default.

    `max_tokens` None: MAX_TOKENS for a text, whatever fits in a chat. `model` empty: the first that is served.
    """

    prompt: str = ""
    messages: Sequence[Message] = ()
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    model: str = ""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.messages else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The request's body, without fields that are not set."""
        asked = {"messages": [*self.messages]} if self.messages else {"prompt": self.prompt, "max_tokens": MAX_TOKENS}
        optional = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "n": self.n if self.n > 1 else None,
        }
        return {"model": model, **asked} | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PingSamples:
    """All samples of a question. seconds: from the question to the whole answer."""

    texts: list[str]
    num_tokens: int
    seconds: float


class Server:
    """A server at `url`. `key`: its API key; empty: none is sent."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url
        self._key = key
        self._model = ""

    def stream(self, question: PingQuestion) -> Generator[str]:
        """Yield pieces of the answer as they come. Raises PingError."""
        with self._translate_errors():
            body = {**question.body(question.model or self._find_model()), "stream": True}
            with self._request("POST", question.path, body) as response:
                yield from _read_pieces(response)

    def ask_samples(self, question: PingQuestion) -> PingSamples:
        """Wait for all samples. Raises PingError."""
        with self._translate_errors():
            body = question.body(question.model or self._find_model())
            began = time.perf_counter()
            with self._request("POST", question.path, body) as response:
                answer = json.load(response)
            seconds = time.perf_counter() - began
            texts = [
                _check_text(each["message"]["content"] if question.messages else each["text"])
                for each in answer["choices"]
            ]
            if not texts:
                raise ValueError("no choices")
            return PingSamples(texts, int(answer["usage"]["completion_tokens"]), seconds)

    def _find_model(self) -> str:
        if not self._model:
            with self._request("GET", "/v1/models") as response:
                self._model = str(json.load(response)["data"][0]["id"])
        return self._model

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn every error into a PingError."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise PingError(f"no answer from {self._url}: {_explain(error)}") from None
        except (LookupError, TypeError, ValueError, RecursionError):
            raise PingError(f"{self._url} does not answer like an OpenAI server") from None

    @contextmanager
    def _request(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        """Yield the response to a request that succeeded, its body unread."""
        parts = _parse_url(self._url)
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with closing(connect(parts.hostname or "", parts.port, timeout=TIMEOUT)) as connection:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            connection.request(method, parts.path.rstrip("/").removesuffix("/v1") + path, json.dumps(body), headers)
            with connection.getresponse() as response:
                if response.status == 401:
                    now = "the key in TOKA_API_KEY is not one of this server's" if self._key else "it needs an API key"
                    raise PingError(f"{self._url}: {now}; set TOKA_API_KEY in the environment")
                if response.status != 200:
                    raise PingError(f"{self._url}: {response.status} {_read_message(response)}")
                yield response


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        wrong = not parts.hostname or parts.port == 0
    except ValueError:  # such as a port that is not a number
        wrong = True
    if wrong:
        raise PingError(f"{url!r}: expected a URL such as http://127.0.0.1:10210")
    return parts


def _read_pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the text of server-sent events; an error event raises PingError."""
    for line in response:
        if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise PingError(f"the server failed: {event['error']['message']}")
        for choice in event["choices"]:
            yield _check_text(choice["delta"].get("content") if "delta" in choice else choice["text"])


def _check_text(given: object) -> str:
    """Make text printable: some servers cut a character between two pieces. Raises TypeError for anything but text."""
    if given is not None and not isinstance(given, str):
        raise TypeError("no text")
    return (given or "").encode("utf-8", "replace").decode()


def _read_message(response: http.client.HTTPResponse) -> str:
    try:
        return str(json.load(response)["error"]["message"])
    except (LookupError, TypeError, ValueError):
        return response.reason


def _explain(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return "nothing listens there; start a server with `toka-async serve`, or name one with --url"
        case socket.gaierror():
            return "unknown host"
        case TimeoutError():
            return "it took too long"
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted ({error.verify_message}); set SSL_CERT_FILE to the file of its "
                "certificate, or of its issuer"
            )
        case ssl.SSLError():
            return "it does not speak TLS there; try http://"
        case http.client.RemoteDisconnected():
            return "it closed the connection; should the URL begin with https://?"
        case OSError():
            return error.strerror or str(error)
        case _:
            return f"broken answer ({type(error).__name__})"
