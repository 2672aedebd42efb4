"""The client against the endpoint over real sockets, with the fake scheduler behind it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.drivers.direct import World, direct_server, runs, wait_for_runs
from tests.drivers.until import until
from tests.fakes.scheduler import FakeScheduler
from toka_async.client import Client, ConnectionLostError, Event, RequestError, Result, Sample, SyncClient
from toka_async.messages import Cancels, Submit, Submits
from toka_async.transport.curve import make_keys, read_public

PROMPT = [1, 2, 3]


async def test_token_ids_in_and_out() -> None:
    async with direct_server() as world, Client(world.url) as client:
        result = await client.generate(PROMPT, n=3, max_tokens=5, seed=7, text=False, logprobs=2)
        assert [sample.finish_reason for sample in result.samples] == ["length"] * 3
        assert [sample.token_ids.tolist() for sample in result.samples] == [
            world.scheduler.script(submit_of(world), sample)[:5] for sample in range(3)
        ]
        assert [sample.text for sample in result.samples] == [""] * 3
        assert all(sample.logprobs.shape == (5,) for sample in result.samples)
        assert all(sample.top_ids.shape == sample.top_logprobs.shape == (5, 2) for sample in result.samples)
        same = await client.generate(np.asarray(PROMPT), n=3, max_tokens=5, seed=7)
        assert [sample.token_ids.tolist() for sample in same.samples] == [
            sample.token_ids.tolist() for sample in result.samples
        ]
        assert all(sample.text for sample in same.samples)


def num_open(client: Client) -> int:
    assert client._connection is not None
    return client._connection.num_open


def submit_of(world: World) -> Submit:
    """The newest request, as one."""
    submits = [message for message in world.scheduler.log if isinstance(message, Submits)][-1]
    (seed,) = np.frombuffer(submits.seeds, np.int64)
    return Submit(request_id=0, prompt=submits.prompts, max_tokens=5, seed=int(seed), sampling=submits.sampling)


async def test_text_in_and_out() -> None:
    async with direct_server() as world, Client(world.url) as client:
        result = await client.generate("the answer is", max_tokens=20, prompt_logprobs=1)
        (sample,) = result.samples
        assert sample.text == world.service.tokenizer.decode(sample.token_ids.tolist(), True)
        assert result.prompt is not None
        num_prompt = len(world.service.tokenizer.encode_batch(["the answer is"], True)[0])
        assert result.prompt.logprobs.shape == (num_prompt - 1,)
        assert result.prompt.top_ids.shape == (num_prompt - 1, 1)
        same = await client.generate("the answer is", max_tokens=20, text=False)
        assert same.samples[0].token_ids.size == 20


async def test_a_stop_string_and_a_stop_token_are_told() -> None:
    ids = [260, 261, 262, 263]

    def script(_submit: Submit, _sample: int) -> list[int]:
        return ids * 9

    async with direct_server(FakeScheduler(script)) as world:
        text = world.service.tokenizer.decode(ids, True, continues=True)
        async with Client(world.url) as client:
            result = await client.generate(PROMPT, max_tokens=30, n=2, stop=["never", text[2:4]])
            assert {sample.stop for sample in result.samples} == {text[2:4]}
            assert {sample.finish_reason for sample in result.samples} == {"stop"}
            assert {sample.text for sample in result.samples} == {text[:2]}
            result = await client.generate(PROMPT, max_tokens=30, stop_token_ids=[262], text=False)
            assert (result.samples[0].stop, result.samples[0].token_ids.tolist()) == (262, [260, 261, 262])


@pytest.mark.parametrize("text", [False, True])
async def test_a_stream_is_the_same_as_the_whole(text: bool) -> None:
    async with direct_server() as world, Client(world.url) as client:
        asked: dict[str, Any] = {"n": 2, "max_tokens": 9, "seed": 3, "text": text, "logprobs": 1}
        whole = await client.generate(PROMPT, **asked)
        tokens: dict[int, list[int]] = {0: [], 1: []}
        texts, reasons, num_events = {0: "", 1: ""}, {}, 0
        async for event in client.stream(PROMPT, **asked):
            num_events += 1
            tokens[event.sample] += event.token_ids.tolist()
            texts[event.sample] += event.text
            assert event.top_ids.shape == (event.token_ids.size, 1)
            if event.finish_reason:
                reasons[event.sample] = event.finish_reason
        assert [*tokens.values()] == [sample.token_ids.tolist() for sample in whole.samples]
        assert [*texts.values()] == [sample.text for sample in whole.samples]
        assert reasons == {0: "length", 1: "length"}
        assert num_events > 2


async def test_many_calls_of_a_turn_are_one_message() -> None:
    async with direct_server(zmq_credit=40) as world, Client(world.url) as client:
        results = await asyncio.gather(
            *(client.generate([i, 2], max_tokens=2, seed=i, text=False) for i in range(100)),
            client.generate_many([[1], [2, 3]], seeds=[1, 2], max_tokens=3, text=False),
        )
        assert [len(result) for result in results if isinstance(result, list)] == [2]
        submits = [message for message in world.scheduler.log if isinstance(message, Submits)]
        assert len(submits[0].request_ids) // 4 == 40
        assert runs(world.scheduler) == 102
        assert len(submits) < 10
        assert num_open(client) == 0


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        (PROMPT, {"temperature": 9.0}, "temperature"),
        (PROMPT, {"nonsense": 1}, "nonsense"),
        *((PROMPT, {"seed": wrong}, "seed") for wrong in (2**70, "x", 1.5)),
        *((wrong, {}, "prompt") for wrong in ([], "", [[1]], [1.5], [2**40], [399, 400], "\ud800", [1] * 600)),
        ("the answer " * 300, {}, "prompt"),
        (PROMPT, {"n": 0}, "n"),
        *((PROMPT, {"stop": wrong}, "stop") for wrong in (5, ["\ud800"], msgspec.json.decode(b"[" * 600 + b"]" * 600))),
        (PROMPT, {"stop": [["a"]]}, "stop[0]"),
        (PROMPT, {"stop_token_ids": 5}, "stop_token_ids"),
        (PROMPT, {"stop_token_ids": [[1]]}, "stop_token_ids[0]"),
        (PROMPT, {"max_tokens": 2, "temperature": np.float32(1)}, "temperature"),
        (PROMPT, {"top_k": 2**70, "max_tokens": 2}, "top_k"),
        (PROMPT, {"logit_bias": {5: 1.0}}, "logit_bias"),
        (PROMPT, {"stream": True}, "stream"),
    ],
)
async def test_refused_input_names_the_field(prompt: Any, fields: dict[str, Any], field: str) -> None:
    async with direct_server() as world, Client(world.url) as client:
        with pytest.raises(RequestError) as caught:
            await client.generate(prompt, **fields)
        assert (caught.value.field, caught.value.status) == (field, 400)
        with pytest.raises(RequestError):
            await anext(aiter(client.stream(prompt, **fields)))
        with pytest.raises(RequestError):
            await client.generate_many([PROMPT, prompt], seeds=None, **fields)
        assert (await client.generate(PROMPT, max_tokens=2)).samples[0].token_ids.size == 2


async def test_fields_that_no_message_can_hold_are_refused() -> None:
    async with direct_server(max_body_mb=1) as world, Client(world.url) as client:
        with pytest.raises(RequestError) as caught:
            await client.generate(PROMPT, stop=["x" * (1 << 20)])
        assert (caught.value.field, caught.value.status) == ("fields", 413)
        assert (await client.generate(PROMPT, max_tokens=2)).samples[0].token_ids.size == 2


async def test_rows_of_an_array_are_prompts_and_characters_of_a_text_are_not() -> None:
    async with direct_server() as world, Client(world.url) as client:
        assert len(await client.generate_many(np.ones((2, 3), np.int32), max_tokens=2)) == 2  # type: ignore[arg-type]
        with pytest.raises(RequestError) as caught:
            await client.generate_many("abc", max_tokens=2)
        assert caught.value.field == "prompts"


async def test_what_takes_results_may_end_the_call() -> None:
    def refuse(place: int, _result: Result) -> None:
        raise ValueError(f"no {place}")

    async with direct_server() as world, Client(world.url) as client:
        assert client.welcome is not None
        with pytest.raises(ValueError, match="no "):
            await client.generate_each([PROMPT] * 3, refuse, max_tokens=2)
        assert (await client.generate(PROMPT, max_tokens=2)).samples


async def test_before_and_after_the_connection_there_is_an_error() -> None:
    async with direct_server() as world:
        client, sync = Client(world.url), SyncClient(world.url)
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match="with"):
                await client.generate(PROMPT)
            with pytest.raises(ConnectionLostError, match="with"):
                await anext(client.stream(PROMPT))
            with pytest.raises(ConnectionLostError, match="with"):
                await asyncio.to_thread(sync.generate, PROMPT)
            with pytest.raises(ConnectionLostError, match="with"):
                await asyncio.to_thread(next, sync.stream(PROMPT))
            async with client:
                pass
            await asyncio.to_thread(open_and_close, sync)


def open_and_close(client: SyncClient) -> None:
    with client:
        pass


async def test_a_task_that_is_cancelled_cancels_its_request() -> None:
    async with direct_server(FakeScheduler(held=True)) as world, Client(world.url) as client:
        task = asyncio.create_task(client.generate(PROMPT, max_tokens=400, text=False))
        texts = asyncio.create_task(client.generate(PROMPT, max_tokens=400))
        await wait_for_runs(world.scheduler, 2)
        task.cancel()
        texts.cancel()
        await asyncio.wait({task, texts})
        async with asyncio.timeout(60):
            await world.engine.wait_idle()
            await until(lambda: not num_open(client))
        world.scheduler.step()
        assert {type(message) for message in world.scheduler.log} == {Submits, Cancels}


async def test_leaving_a_stream_cancels_its_request() -> None:
    async with direct_server() as world, Client(world.url) as client:
        async with contextlib.aclosing(client.stream(PROMPT, max_tokens=400, text=False)) as events:
            async for _ in events:
                break
        async with asyncio.timeout(60):
            await world.engine.wait_idle()


async def test_keys_let_their_clients_in_and_nobody_else(tmp_path: Path) -> None:
    make_keys(tmp_path, "server")
    make_keys(tmp_path / "clients", "ours")
    make_keys(tmp_path, "stranger")
    keys: dict[str, Any] = {"zmq_key": str(tmp_path / "server.key_secret"), "zmq_clients": str(tmp_path / "clients")}
    async with direct_server(**keys) as world:
        ours, server_key = tmp_path / "clients" / "ours.key_secret", tmp_path / "server.key"
        async with Client(world.url, key=ours, server_key=server_key) as client:
            assert (await client.generate(PROMPT, max_tokens=2, text=False)).samples[0].token_ids.size == 2
            public = read_public(tmp_path / "clients" / "ours.key").decode()
            assert list(world.service.accounts.by_name) == [f"client {public}"]
            await client.generate("the answer", max_tokens=2)
            salts = {message.salt for message in world.scheduler.log if isinstance(message, Submits)}
            assert len(salts) == 1, "a client finds its own prompts in the cache, whichever way they come"
            assert 0 not in salts
        with pytest.raises(ConnectionLostError, match="accept the keys"):
            async with Client(world.url, key=tmp_path / "stranger.key_secret", server_key=server_key, timeout=60):
                pass
        with pytest.raises(ConnectionLostError, match="needs keys"):
            async with Client(world.url, timeout=60):
                pass
        with pytest.raises(ConnectionLostError, match="server_key is not"):
            async with Client(world.url, key=ours, server_key=tmp_path / "stranger.key"):
                pass
        (tmp_path / "stranger.key").rename(tmp_path / "clients" / "stranger.key")  # no stranger any more
        ours.with_suffix(".key").unlink()
        async with Client(world.url, key=tmp_path / "stranger.key_secret", server_key=server_key) as client:
            assert (await client.generate(PROMPT, max_tokens=2, text=False)).samples[0].token_ids.size == 2
        with pytest.raises(ConnectionLostError):
            async with Client(world.url, key=ours, server_key=server_key, timeout=0.3):
                pass


# ---- without asyncio


def test_a_result_is_shown_in_a_line() -> None:
    sample = Sample(np.arange(1000, dtype=np.int32), "word " * 100, "stop", stop="x")
    shown = repr(Result([sample] * 64, 16))
    assert shown.startswith("Result([Sample('word word ")
    assert shown.endswith("…', 1000 tokens, stop, stop='x'), and 63 more], cached_tokens=16)")
    assert len(shown) < 160
    assert repr(Event(np.arange(2, dtype=np.int32), "a", None, sample=1)) == "Event('a', 2 tokens, None)"
    assert repr(Result([], 0)) == "Result([], cached_tokens=0)"
