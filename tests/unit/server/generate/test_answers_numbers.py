"""What a trainer reads of an answer: kinds of log-probs, arrays, versions of the weights, aborts, token ids."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.drivers.until import until
from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import FakeScheduler, kept_of, random_tokens, select_logprobs
from toka_async.arrays import Int32, as_i32
from toka_async.messages import LogprobKind

COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
IDS = [72, 101, 108, 108, 111]
ASKED = {"max_tokens": 4, "seed": 1}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server() as server:
        yield server


def integers(text: str) -> list[int]:
    values: list[int] = np.frombuffer(base64.b64decode(text), "<i4").tolist()
    return values


def floats(text: str) -> Any:
    return pytest.approx(np.frombuffer(base64.b64decode(text), "<f4").tolist())


def drawn(server: WebServer, sample: int = 0) -> Int32:
    return np.asarray(random_tokens(server.scheduler.submits[-1], sample)[:4], np.int32)


@pytest.mark.parametrize(
    ("mode", "kind", "prompt_temperature"),
    [
        ("raw", LogprobKind.RAW, 1),
        ("temperature", LogprobKind.TEMPERATURE, 0.5),
        ("processed", LogprobKind.PROCESSED, 0.5),
    ],
)
async def test_the_kind_of_log_probs_is_the_requests(
    server: WebServer, mode: str, kind: LogprobKind, prompt_temperature: float
) -> None:
    await server.ok(COMPLETIONS, {"prompt": IDS, "logprobs": 0, "logprobs_mode": mode, "temperature": 0.5} | ASKED)
    sampling = server.scheduler.submits[-1].sampling
    assert sampling.logprob_kind is kind
    assert sampling.prompt_temperature == prompt_temperature
    error = await server.error(COMPLETIONS, {"prompt": IDS, "logprobs_mode": "raw_logits"} | ASKED)
    assert error["param"] == "logprobs_mode"


async def test_the_server_has_a_default_kind() -> None:
    async with web_server(logprobs_mode="processed") as server:
        await server.ok(CHAT, {"messages": MESSAGES, "logprobs": True} | ASKED)
        assert server.scheduler.submits[-1].sampling.logprob_kind is LogprobKind.PROCESSED
        await server.ok(TOKENS, {"token_ids": IDS, "sampling_params": {"logprobs": 0, "temperature": 0} | ASKED})
        sampling = server.scheduler.submits[-1].sampling
        assert sampling.logprob_kind is LogprobKind.PROCESSED
        assert sampling.prompt_temperature == 1  # greedy
        await server.ok(COMPLETIONS, {"prompt": IDS, "logprobs": 0, "logprobs_mode": "raw"} | ASKED)
        assert server.scheduler.submits[-1].sampling.logprob_kind.name == "RAW"


@pytest.mark.parametrize("num_top", [0, 2])
async def test_packed_log_probs_of_completions(server: WebServer, num_top: int) -> None:
    asked = {"prompt": IDS, "n": 2, "logprobs": num_top, "packed_logprobs": True, "logprobs_mode": "processed"} | ASKED
    for sample, choice in enumerate((await server.ok(COMPLETIONS, asked))["choices"]):
        ids, packed = drawn(server, sample), choice["packed_logprobs"]
        assert choice["logprobs"] is None
        assert integers(packed["token_ids"]) == ids.tolist()
        assert select_logprobs(ids).tolist() == floats(packed["logprobs"])
        assert integers(packed["kept"]) == kept_of(ids).tolist()
        assert (1 / kept_of(ids)).tolist() == floats(packed["masses"])
        assert packed["num_top"] == num_top
        assert ("top_ids" in packed) == (num_top > 0)
        if num_top:
            assert len(integers(packed["top_ids"])) == 4 * num_top
            assert select_logprobs(np.asarray(integers(packed["top_ids"]))).tolist() == floats(packed["top_logprobs"])


async def test_packed_log_probs_of_chats_and_prompts(server: WebServer) -> None:
    asked = {"messages": MESSAGES, "packed_logprobs": True, "prompt_logprobs": 1, "prompt_token_ids": IDS} | ASKED
    answer = await server.ok(CHAT, asked | {"logprobs": True, "return_token_ids": True})
    assert as_i32(server.scheduler.submits[-1].prompt).tolist() == IDS == answer["prompt_token_ids"]
    (choice,) = answer["choices"]
    assert integers(choice["packed_logprobs"]["token_ids"]) == drawn(server).tolist() == choice["token_ids"]
    assert "kept" not in choice["packed_logprobs"]
    packed = answer["packed_prompt_logprobs"]
    assert "prompt_logprobs" not in answer
    assert select_logprobs(np.asarray(IDS[1:])).tolist() == floats(packed["logprobs"])
    assert integers(packed["ranks"]) == [token_id + 1 for token_id in IDS[1:]]
    assert packed["num_top"] == 1
    assert len(integers(packed["top_ids"])) == 4
    only = await server.ok(CHAT, asked)
    assert "packed_logprobs" not in only["choices"][0]
    assert only["packed_prompt_logprobs"] == packed
    echoed = {"prompt": IDS, "echo": True, "logprobs": 0, "packed_logprobs": True} | ASKED
    (choice,) = (await server.ok(COMPLETIONS, echoed))["choices"]
    assert select_logprobs(np.asarray(IDS[1:])).tolist() == floats(choice["packed_prompt_logprobs"]["logprobs"])
    assert choice["text"].startswith(server.tokenizer.decode(IDS))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_streamed_chunks_have_arrays_and_versions(path: str) -> None:
    scheduler = FakeScheduler(held=True)
    async with web_server(scheduler) as server:
        prompt = {"prompt": IDS, "logprobs": 0} if path == COMPLETIONS else {"messages": MESSAGES, "logprobs": True}
        asked = prompt | ASKED | {"packed_logprobs": True, "return_weight_versions": True}
        events = asyncio.create_task(server.events(path, asked))
        await until(lambda: server.engine.num_requests == 1)
        for version in ("default", "default", "step-1", "step-2"):
            scheduler.version = version
            scheduler.step()
            await asyncio.sleep(0)
        choices = [event["choices"][0] for event in await events]
        choices = [choice for choice in choices if "packed_logprobs" in choice]
        ids = [token_id for choice in choices for token_id in integers(choice["packed_logprobs"]["token_ids"])]
        assert ids == drawn(server).tolist()
        spans = [span for choice in choices for span in choice["weight_versions"]]
        versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        assert versions == ["default", "default", "step-1", "step-2"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, TOKENS])
async def test_versions_of_a_whole_sample(path: str) -> None:
    scheduler = FakeScheduler(held=True)
    async with web_server(scheduler) as server:
        asked: dict[str, Any] = {"prompt": IDS, "return_weight_versions": True} | ASKED
        if path == CHAT:
            asked = {"messages": MESSAGES, "return_weight_versions": True} | ASKED
        elif path == TOKENS:
            asked = {"token_ids": IDS, "sampling_params": ASKED}
        answer = asyncio.create_task(server.ok(path, asked))
        await until(lambda: server.engine.num_requests == 1)
        for version in ("default", "step-1", "step-1", "step-2"):
            scheduler.version = version
            scheduler.step()
        assert (await answer)["choices"][0]["weight_versions"] == [
            {"version": "default", "start": 0, "end": 1},
            {"version": "step-1", "start": 1, "end": 3},
            {"version": "step-2", "start": 3, "end": 4},
        ]


async def test_an_abort_answers_with_what_there_is() -> None:
    scheduler = FakeScheduler(held=True)
    async with web_server(scheduler) as server:
        asked = {"prompt": IDS, "logprobs": 0, "return_token_ids": True, "request_id": "mine"} | ASKED
        running = asyncio.create_task(server.ok(COMPLETIONS, asked))
        await until(lambda: server.engine.num_requests == 1)
        scheduler.step()
        scheduler.step()
        more = {"prompt_logprobs": 0, "packed_logprobs": True}
        queued = asyncio.create_task(server.ok(COMPLETIONS, asked | more | {"request_id": "queued"}))
        plain = asyncio.create_task(server.ok(CHAT, {"messages": MESSAGES, "prompt_logprobs": 1} | ASKED))
        await until(lambda: server.engine.num_requests == 3)
        aborted = asyncio.create_task(server.engine.control.abort())
        await asyncio.sleep(0)  # the action is on its way
        scheduler.paused = "keep"  # none of them begins
        scheduler.step()
        assert await aborted == 3
        answer = await running
        (choice,) = answer["choices"]
        assert answer["id"] == "cmpl-mine"
        assert choice["finish_reason"] == "abort"
        assert choice["token_ids"] == drawn_of(scheduler, 0)[:2]
        assert len(choice["logprobs"]["token_logprobs"]) == 2
        (choice,) = (await queued)["choices"]
        assert (choice["finish_reason"], choice["token_ids"], choice["text"]) == ("abort", [], "")
        assert choice["packed_prompt_logprobs"] is None
        assert integers(choice["packed_logprobs"]["token_ids"]) == []
        answer = await plain
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert answer["prompt_logprobs"] is None


def drawn_of(scheduler: FakeScheduler, number: int) -> list[int]:
    return random_tokens(scheduler.submits[number], 0)


async def test_fields_of_trainers(server: WebServer) -> None:
    """Those that rl trainers send, which other servers take."""
    for logprobs, expected in ((True, 1), (False, -1), (0, 0)):
        await server.ok(COMPLETIONS, {"prompt": IDS, "logprobs": logprobs, "session_id": "s"} | ASKED)
        assert server.scheduler.submits[-1].sampling.num_logprobs == expected
    await server.ok(COMPLETIONS, {"prompt": IDS, "spaces_between_special_tokens": False} | ASKED)
    await server.ok(
        COMPLETIONS,
        {"prompt": IDS, "spaces_between_special_tokens": False, "skip_special_tokens": False} | ASKED,
    )
    answer = await server.ok(COMPLETIONS, {"prompt": IDS, "logprobs": 0, "return_tokens_as_token_ids": True} | ASKED)
    names = answer["choices"][0]["logprobs"]["tokens"]
    assert names == [f"token_id:{token_id}" for token_id in drawn(server).tolist()]
    salted = {"prompt": IDS, "cache_salt": "step-3"} | ASKED
    await server.ok(COMPLETIONS, salted)
    assert server.scheduler.submits[-1].salt != 0
    for name, value in (("return_token_offsets", True), ("vllm_xargs", {"a": 1}), ("logprob_token_ids", [1])):
        assert (await server.error(COMPLETIONS, {"prompt": IDS, name: value} | ASKED))["param"] == name


async def test_the_most_log_probs_are_the_servers() -> None:
    async with web_server() as server:
        error = await server.error(COMPLETIONS, {"prompt": IDS, "prompt_logprobs": 100} | ASKED)
        assert error["param"] == "prompt_logprobs"
        assert "limits.max_logprobs" in error["message"]
        assert (await server.error(COMPLETIONS, {"prompt": IDS, "logprobs": -1} | ASKED))["param"] == "logprobs"
    async with web_server(max_logprobs=-1) as server:
        vocab_size = server.engine.check_serving().vocab_size
        await server.ok(COMPLETIONS, {"prompt": IDS, "prompt_logprobs": 100} | ASKED)
        assert server.scheduler.submits[-1].sampling.num_prompt_logprobs == 100
        await server.ok(CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1} | ASKED)
        assert server.scheduler.submits[-1].sampling.num_logprobs == vocab_size


async def test_what_cannot_be_packed_is_refused(server: WebServer) -> None:
    asked: dict[str, Any] = {"prompt": IDS, "packed_logprobs": True} | ASKED
    for more in ({}, {"logprobs_in_fingerprint": True}):
        assert (await server.error(COMPLETIONS, asked | more))["param"] == "packed_logprobs"
