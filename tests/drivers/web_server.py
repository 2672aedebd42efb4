"""The web application on a real port, with the fake scheduler behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web, web_app

from tests.cases.tokenizers import byte_level
from tests.drivers.config import make_config
from tests.fakes.scheduler import FakeScheduler
from toka_async.batches.clock import SettledClock
from toka_async.batches.store import Store
from toka_async.checkpoint.generation import GenerationDefaults
from toka_async.control import Control
from toka_async.listening import max_connections, open_listener
from toka_async.server.access.keys import Keys, KeySource
from toka_async.server.app import create_app
from toka_async.server.engine.engine import Engine
from toka_async.server.http.acceptor import Acceptor
from toka_async.server.http.connections import create_runner
from toka_async.text.chat import ChatTemplate
from toka_async.text.tokenizer import Tokenizer

NAME = "org/tiny"
JSON = {"Content-Type": "application/json"}
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"  # goes on
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class WebServer:
    """What a test needs of it."""

    url: str
    engine: Engine
    scheduler: FakeScheduler
    tokenizer: Tokenizer
    app: web.Application
    runner: web.AppRunner
    address: tuple[str, int]
    http: aiohttp.ClientSession

    @property
    def actions(self) -> list[Any]:
        """What trainers had the scheduler do."""
        return [message.action for message in self.scheduler.log if isinstance(message, Control)]

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded JSON; a str or bytes body is sent as it is."""
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        async with self.http.post(self.url + path, data=data, headers=JSON) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, await response.json()

    async def ok(self, path: str, body: Any) -> Any:
        """The body of a 200."""
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def error(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error in an answer of that status, its shape checked."""
        got, answer = await self.post(path, body)
        assert got == status, answer
        return checked_error(answer)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream: of one whose events have no names, and no error at its end, without its [DONE]."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        names = [line.rpartition("\n")[0] for line in lines]
        datas = [line.rpartition("\n")[2].removeprefix("data: ") for line in lines]
        if any(names):
            assert names == [f"event: {json.loads(data)['type']}" for data in datas]
        elif "error" not in datas[-1]:
            assert datas.pop() == "[DONE]"
        return [json.loads(data) for data in datas]


def checked_error(answer: Any) -> dict[str, Any]:
    """The error of a response in OpenAI's shape."""
    assert answer.keys() == {"error"}
    error: dict[str, Any] = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@asynccontextmanager
async def web_server(
    scheduler: FakeScheduler | None = None,
    tokenizer: Tokenizer | None = None,
    template: str | None = TEMPLATE,
    defaults: GenerationDefaults | None = None,
    keys: Keys | KeySource | None = None,
    **config: Any,
) -> AsyncIterator[WebServer]:
    """A server; `config` are fields as `make_config` takes them, `data_dir` among them."""
    scheduler, tokenizer = scheduler or FakeScheduler(), tokenizer or byte_level()
    settings = make_config(**{"log_stats_interval": 0.0, "port": 0} | config)
    engine = Engine([scheduler], settings.limits.max_requests)
    chat_template = None if template is None else ChatTemplate(template, tokenizer.special_tokens)
    store = Store(Path(folder), SettledClock()) if (folder := settings.server.data_dir) else None
    source = keys if isinstance(keys, KeySource) else lambda: keys or Keys()
    app = create_app(settings, NAME, tokenizer, chat_template, defaults or GenerationDefaults(), engine, store, source)
    runner = create_runner(app)
    await runner.setup()
    listener = open_listener(settings.server, settings.limits.client_timeout)
    host, port = address = listener.getsockname()[:2]
    acceptor = Acceptor(
        runner, listener, max_connections(settings.limits, settings.zmq), settings.limits.client_timeout
    )
    acceptor.show(engine.metrics)
    await acceptor.start()
    scheduler.start(engine.on_messages)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as http:
            yield WebServer(f"http://{host}:{port}", engine, scheduler, tokenizer, app, runner, address, http)
    finally:
        await runner.cleanup()
        web_app._cached_build_middleware.cache_clear()  # it keeps 1,024 routes, and with each its whole application
