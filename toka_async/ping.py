"""Asks a running server one thing and yields the answer as it streams: a test of a server by hand. Stdlib only."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

TIMEOUT = 600.0  # seconds without a byte
MAX_TOKENS = 256  # of a completion, for which the API's own default is 16


class PingError(Exception):
    """The server is not there or did not answer; the message is one line."""


def ping(url: str, prompt: str, *, chat: bool = False, max_tokens: int | None = None, key: str = "") -> Iterator[str]:
    """Pieces of the served model's answer to `prompt`, as they come; `max_tokens` None: MAX_TOKENS, or in a chat any.

    `key`: of the API; empty: none is sent.

    Raises:
        PingError: no server there, or it answered with an error.
    """
    try:
        with _request(url, key, "GET", "/v1/models") as response:
            model = json.load(response)["data"][0]["id"]
        path, body = ("/v1/chat/completions", _chat(prompt)) if chat else ("/v1/completions", _completion(prompt))
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        with _request(url, key, "POST", path, {"model": model, "stream": True, **body, **limit}) as response:
            yield from _pieces(response)
    except (OSError, http.client.HTTPException) as error:
        raise PingError(f"no answer from {url}: {_reason(error)}") from None
    except (LookupError, TypeError, ValueError):
        raise PingError(f"{url} does not answer like an OpenAI server") from None


def _chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _completion(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": MAX_TOKENS}


@contextmanager
def _request(url: str, key: str, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
    """The response to a request that went well, its body still to be read."""
    parts = _parts(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with closing(connect(parts.hostname or "", parts.port, timeout=TIMEOUT)) as connection:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request(method, parts.path.rstrip("/").removesuffix("/v1") + path, json.dumps(body), headers)
        with connection.getresponse() as response:
            if response.status != 200:
                raise PingError(f"{url}: {response.status} {_message(response)}")
            yield response


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        wrong = not parts.hostname or parts.port == 0
    except ValueError:  # such as a port that is no number
        wrong = True
    if wrong:
        raise PingError(f"{url!r}: expected a URL such as http://127.0.0.1:10210")
    return parts


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The text of server-sent events; an error event raises PingError."""
    for line in response:
        if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise PingError(f"the server failed: {event['error']['message']}")
        for choice in event["choices"]:
            yield (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""


def _message(response: http.client.HTTPResponse) -> str:
    try:
        return str(json.load(response)["error"]["message"])
    except (LookupError, TypeError, ValueError):
        return response.reason


def _reason(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return "nothing listens there"
        case socket.gaierror():
            return "unknown host"
        case TimeoutError():
            return "it took too long"
        case OSError():
            return error.strerror or str(error)
        case _:
            return f"broken answer ({type(error).__name__})"
