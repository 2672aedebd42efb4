from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import toka_async.server
from tests.drivers.until import until
from tests.drivers.web_server import JSON, WebServer, web_server
from tests.fakes.scheduler import READY, FakeScheduler
from tests.processes.keyed import KEYS
from toka_async.logs import JsonLines
from toka_async.server.access.access_log import MOST_REASON

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "the secret", "max_tokens": 2})


async def id_of(server: WebServer, path: str, body: str | None = None, **headers: str) -> str:
    method = "GET" if body is None else "POST"
    async with server.http.request(method, server.url + path, data=body, headers=JSON | headers) as response:
        await response.read()
        return response.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(PATH, BODY), (PATH, '{"prompt": "x", "max_tokens": 2, "stream": true}'), (PATH, "{"), ("/nowhere", None)],
)
async def test_every_answer_has_an_id(path: str, body: str | None) -> None:
    async with web_server() as server:
        assert await id_of(server, path, body, **{"X-Request-Id": "mine-1"}) == "mine-1"
        made = [await id_of(server, path, body) for _ in range(2)]
        assert made[0] != made[1]
        assert len(made[0]) == 32
        assert await id_of(server, path, body, **{"X-Request-Id": "a b"}) != "a b"
        assert await id_of(server, path, body, **{"X-Request-Id": "x" * 129}) != "x" * 129


@pytest.mark.parametrize("log", [False, True])
async def test_a_line_for_each_request_without_its_content(log: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(JsonLines("server"))
    async with web_server(log_requests=log) as server:
        await id_of(server, PATH, BODY, **{"X-Request-Id": "mine-1"})
        await id_of(server, "/v1/files%0Aforged?x=secret", None, **{"X-Request-Id": "mine-2"})
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    ours = [line for line in lines if line["logger"] == "toka_async.server.access.access_log"]
    assert "secret" not in caplog.text
    assert "forged" not in caplog.text
    assert [(each["request_id"], each["path"], each["status"]) for each in ours] == (
        [("mine-1", PATH, 200), ("mine-2", "other", 404)] if log else []
    )


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(JsonLines("server"))
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    return [line for line in lines if line["logger"] == "toka_async.server.access.access_log"]


@pytest.mark.parametrize("log", [False, True])
async def test_what_a_client_has_to_mend_is_told_whether_lines_are_wanted_or_not(
    log: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert lines_of(caplog) == []
    async with web_server(log_requests=log) as server:
        await server.error(PATH, {"prompt": "the secret", "temperature": -3})
        await server.error(PATH, {"prompt": "the secret", "model": "x" * 9999}, status=404)
    temperature, model = lines_of(caplog)
    assert (temperature["level"], temperature["status"], temperature["path"]) == ("info", 400, PATH)
    assert temperature["reason"].startswith("'temperature': expected")
    assert temperature["message"].endswith(f" s: {temperature['reason']}")
    assert len(temperature["request_id"]) == 32
    assert model["reason"] == "the model '" + "x" * (MOST_REASON - len("the model '"))
    assert "secret" not in caplog.text


async def test_a_template_that_quotes_the_messages_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog) == []
    template = "{{ raise_exception('no: ' + messages[0].content) }}"
    async with web_server(template=template) as server:
        error = await server.error("/v1/chat/completions", {"messages": [{"role": "user", "content": "the secret"}]})
    assert "the secret" in error["message"]
    assert [line["reason"] for line in lines_of(caplog)] == ["the chat template does not take the messages"]
    assert "secret" not in caplog.text


async def test_errors_that_strangers_make_many_of_are_counted_only(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog) == []
    async with web_server(keys=KEYS) as server:
        await server.error(PATH, {}, status=401)
        await server.get("/nowhere")
    assert lines_of(caplog) == []


@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"logprobs": 2}, {"stop": ["nothing"]}])
async def test_a_line_has_the_tokens(extra: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog) == []
    async with web_server(log_requests=True) as server:
        body = {"prompt": [[5, 6, 7], [8]], "n": 3, "max_tokens": 4, **extra}
        await id_of(server, PATH, json.dumps(body))
        await id_of(server, "/v1/models")
    completion, models = lines_of(caplog)
    assert (completion["prompt_tokens"], completion["output_tokens"]) == (4, 2 * 3 * 4)
    assert completion["message"].endswith(" s, 4 prompt and 24 output tokens")
    assert "prompt_tokens" not in models


async def test_requests_are_counted_by_route_and_status() -> None:
    async with web_server(FakeScheduler(held=True)) as server:
        await server.error(PATH, {"max_tokens": 0})
        await server.get("/v1/models/a")
        await server.get("/v1/models/b")
        leaving = asyncio.create_task(server.post(PATH, {"prompt": "x"}))
        await until(lambda: server.engine.num_requests == 1)
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: not server.engine.busy)
        text = server.engine.metrics.text().decode()
    assert f'toka:http_requests_total{{path="{PATH}",status="400"}} 1.0' in text
    assert 'toka:http_requests_total{path="/v1/models/{model}",status="404"} 2.0' in text
    assert f'toka:http_requests_total{{path="{PATH}",status="499"}} 1.0' in text


async def test_load() -> None:
    scheduler = FakeScheduler(ready=None, held=True)
    async with web_server(scheduler, max_requests=5) as server:
        _, load = await server.get("/load")
        assert (load["replicas"][0]["state"], load["requests"], load["max_requests"]) == ("starting", 0, 5)
        server.engine.on_messages([READY])
        answer = asyncio.create_task(server.ok(PATH, {"prompt": [5, 6, 7], "n": 2, "max_tokens": 4}))
        await until(lambda: server.engine.num_requests == 1)
        scheduler.step()
        _, load = await server.get("/load")
        replica = load["replicas"][0]
        assert (load["requests"], load["running"], load["waiting"], load["outstanding_tokens"]) == (1, 1, 0, 3 + 2 * 4)
        assert (replica["state"], replica["running"], replica["outstanding_tokens"]) == ("up", 1, 11)
        for _ in range(3):
            scheduler.step()
        await answer
        _, load = await server.get("/load")
        assert (load["requests"], load["outstanding_tokens"]) == (0, 0)


async def test_health_says_who_is_silent() -> None:
    async with web_server() as server:
        server.engine.silent = ("rank-0-1",)
        status, answer = await server.get("/health")
        assert (status, answer["error"]["message"]) == (503, "no answer from rank-0-1")
        assert "toka:processes_silent 1.0" in server.engine.metrics.text().decode()
        await server.ok(PATH, {"prompt": "x", "max_tokens": 1})  # until it counts as dead
        server.engine.silent = ()
        assert (await server.get("/health"))[0] == 200


async def test_the_guide_explains_every_metric(tmp_path: Path) -> None:
    guide = Path(toka_async.server.__file__).with_name("OPERATIONS.md").read_text(encoding="utf-8")
    async with web_server(data_dir=str(tmp_path)) as server:
        text = server.engine.metrics.text().decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE toka:")}
    plain = {name.removeprefix("toka:").removesuffix("_total").removesuffix("_created") for name in names}
    assert len(plain) > 40
    assert {name for name in plain if f"`{name}`" not in guide} == set()
