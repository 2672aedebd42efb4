from __future__ import annotations

import threading

import pytest

import toka_async
from tests.cases import tokenizers as small
from tests.drivers.web_server import NAME, WebServer, checked_error, web_server
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.text.tokenizer import Tokenizer


async def test_models(server: WebServer) -> None:
    status, answer = await server.get("/v1/models")
    assert status == 200
    (model,) = answer["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (NAME, "model", 512)
    assert (model["root"], model["parent"]) == (NAME, None)
    assert await server.get(f"/v1/models/{NAME}") == (200, model)
    assert await server.get("/v1/models/" + NAME.replace("/", "%2F")) == (200, model)
    status, answer = await server.get("/v1/models/org/other")
    assert status == 404
    error = checked_error(answer)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == f"the model 'org/other' does not exist; this server serves '{NAME}'"


async def test_small_routes(server: WebServer) -> None:
    assert (await server.get("/health"))[0] == 200
    assert (await server.get("/ping"))[0] == 200
    assert await server.get("/version") == (200, {"version": toka_async.__version__})


async def test_health_follows_the_engine() -> None:
    async with web_server(FakeScheduler(ready=None)) as server:
        for path in ("/health", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
            status, answer = await (server.get(path) if path == "/health" else server.post(path, body))
            assert status == 503
            assert "starting" in checked_error(answer)["message"]
        assert (await server.get("/ping"))[0] == 200
        assert (await server.get("/v1/models"))[0] == 503
        server.engine.on_messages([READY])
        assert (await server.get("/health"))[0] == 200
        assert (await server.get("/v1/models"))[0] == 200
        server.engine.begin_drain()
        status, answer = await server.get("/health")
        assert (status, checked_error(answer)["type"]) == (503, "server_error")


async def test_tokenize_and_back(server: WebServer) -> None:
    answer = await server.ok("/tokenize", {"model": NAME, "prompt": "the 你好"})
    assert answer["tokens"] == server.tokenizer.encode("the 你好")
    assert answer["count"] == len(answer["tokens"])
    assert await server.ok("/detokenize", {"model": NAME, "tokens": answer["tokens"]}) == {"prompt": "the 你好"}
    assert (answer["max_model_len"], "token_strs" in answer) == (512, False)
    spelled = await server.ok("/tokenize", {"prompt": "the the", "return_token_strs": True})
    assert spelled["token_strs"] == [server.tokenizer.backend.id_to_token(i) for i in spelled["tokens"]]
    assert spelled["token_strs"][-1].startswith("Ġ")
    assert (await server.ok("/tokenize", {"prompt": ""}))["count"] == 0
    assert await server.ok("/detokenize", {"tokens": []}) == {"prompt": ""}


async def test_very_many_tokens_are_spelled_in_a_thread(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def spelling(_: Tokenizer, token_id: int) -> str:
        threads.add(threading.current_thread())
        return str(token_id)

    monkeypatch.setattr(Tokenizer, "spelling", spelling)
    answer = await server.ok("/tokenize", {"prompt": "the 你好" * 3000, "return_token_strs": True})
    assert answer["count"] > 4096
    assert answer["token_strs"] == [str(token_id) for token_id in answer["tokens"]]
    assert threading.main_thread() not in threads


async def test_very_many_tokens(server: WebServer) -> None:
    """Text in parts, of ids that are read in pieces; also where a part ends within a character."""
    text = 'the 你好 👍🏽\n" ' * 30
    ids = server.tokenizer.encode(text, False)
    for length in range(3):  # bytes before the first character
        tokens = server.tokenizer.encode("x" * length, False) + ids * (100_000 // len(ids))
        decoded = server.tokenizer.decode(tokens, False)
        assert await server.ok("/detokenize", {"tokens": tokens}) == {"prompt": decoded}
        assert decoded == "x" * length + text * (100_000 // len(ids))
    assert (await server.error("/detokenize", {"tokens": [*tokens, 400]}))["param"] == "tokens"


async def test_a_text_of_tokens_has_a_bound() -> None:
    async with web_server(max_body_mb=1) as server:
        pieces = server.tokenizer.pieces.rest
        longest = max(pieces, key=lambda i: len(pieces[i]))
        most = (1 << 20) // len(pieces[longest])
        assert len(str(longest)) + 1 < len(pieces[longest])
        fits = await server.ok("/detokenize", {"tokens": [longest] * (most - 100)})
        assert len(fits["prompt"].encode()) > 10**6
        error = await server.error("/detokenize", f'{{"tokens":[{longest}{f",{longest}" * most}]}}')
        assert error["param"] == "tokens"
        assert "limits.max_body_mb" in error["message"]


async def test_special_tokens() -> None:
    async with web_server(tokenizer=small.byte_fallback()) as server:
        with_bos = (await server.ok("/tokenize", {"prompt": "the"}))["tokens"]
        assert with_bos[0] == server.tokenizer.bos_token_id
        assert (await server.ok("/tokenize", {"prompt": "the", "add_special_tokens": False}))["tokens"] == with_bos[1:]
        assert (await server.ok("/detokenize", {"tokens": with_bos}))["prompt"].startswith("<s>")


async def test_bad_requests(server: WebServer) -> None:
    assert (await server.error("/tokenize", {}))["param"] == "prompt"
    assert (await server.error("/tokenize", {"prompt": "x", "messages": []}))["param"] == "prompt"
    assert (await server.error("/tokenize", {"messages": []}))["param"] == "messages"
    assert (await server.error("/tokenize", {"prompt": ["x"]}))["param"] == "prompt"
    assert (await server.error("/detokenize", {"tokens": [400]}))["param"] == "tokens"
    assert (await server.error("/detokenize", {"tokens": ["x"]}))["param"] == "tokens[0]"
    assert (await server.error("/detokenize", {}))["param"] == "tokens"


async def test_metrics(server: WebServer) -> None:
    await server.ok("/v1/completions", {"prompt": [5, 6, 7], "n": 2, "max_tokens": 4})
    async with server.http.get(server.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        lines = (await response.text()).splitlines()
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert values["toka:prompt_tokens_total"] == 3
    assert values["toka:generation_tokens_total"] == 8
    assert values['toka:request_success_total{finished_reason="length"}'] == 2
    assert values["toka:time_to_first_token_seconds_count"] == 1
    assert values["toka:inter_token_latency_seconds_count"] == 2 * 3
    assert values["toka:e2e_request_latency_seconds_count"] == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert f"toka:{name}" in values
