from __future__ import annotations

from typing import Any

import pytest

from tests.drivers.web_server import NAME, WebServer, web_server
from tests.fakes.scheduler import FakeScheduler, random_tokens
from toka_async.arrays import as_i32
from toka_async.checkpoint.generation import GenerationDefaults

PATH = "/inference/v1/generate"
IDS = [72, 101, 108, 108, 111]


def body(sampling: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"token_ids": IDS, "sampling_params": {"max_tokens": 4, "seed": 1} | (sampling or {}), **fields}


def drawn(server: WebServer, sample: int = 0, count: int = 4) -> list[int]:
    """The tokens that the fake model draws for the last prompt."""
    return random_tokens(server.scheduler.submits[-1], sample)[:count]


async def test_ids_in_ids_out(server: WebServer) -> None:
    answer = await server.ok(PATH, body({"logprobs": 2}, model=NAME, request_id="mine", return_token_ids=True))
    ids = drawn(server)
    assert as_i32(server.scheduler.submits[-1].prompt).tolist() == IDS
    assert (answer["request_id"], answer["model"], answer["output_mode"]) == ("mine", NAME, "tokens")
    assert answer["prompt_token_ids"] == IDS
    assert answer["prompt_logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 4
    (choice,) = answer["choices"]
    assert choice.keys() == {"index", "finish_reason", "stop_reason", "token_ids", "logprobs", "weight_versions"}
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (ids, "length", None)
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == ids
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in ids]
    for token_id, entry in zip(ids, content, strict=True):
        assert entry["logprob"] == pytest.approx(-0.1 - token_id % 2 - token_id / 1000)
        first, *others = entry["top_logprobs"]
        assert first == {name: entry[name] for name in ("token", "token_id", "logprob", "rank", "bytes")}
        is_likely = token_id % 2 == 0  # odd tokens are none of the fake model's likeliest
        assert entry["rank"] == (1 if is_likely else None)
        assert [other["rank"] for other in others] == ([2] if is_likely else [1, 2])


async def test_samples_have_no_texts_unless_asked_for(server: WebServer) -> None:
    plain = await server.ok(PATH, body())
    assert "text" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    answer = await server.ok(PATH, body({"logprobs": 0}, output_mode="text"))
    (choice,) = answer["choices"]
    assert choice["text"] == server.tokenizer.decode(choice["token_ids"], continues=True)
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == server.tokenizer.token_text(token_id)
        assert bytes(entry["bytes"]) == server.tokenizer.token_bytes(token_id)


async def test_all_samples_come(server: WebServer) -> None:
    answer = await server.ok(PATH, body({"n": 3, "output_kind": 2}))
    assert [choice["token_ids"] for choice in answer["choices"]] == [drawn(server, sample) for sample in range(3)]


async def test_max_tokens_is_the_rest_of_the_context(server: WebServer) -> None:
    await server.ok(PATH, {"token_ids": IDS, "sampling_params": {}})
    assert server.scheduler.submits[-1].max_tokens == 512 - len(IDS)


async def test_the_models_sampling_defaults_do_not_hold_but_its_end_does() -> None:
    async with web_server(defaults=GenerationDefaults(temperature=0.5, top_k=7, eos_token_ids=(9,))) as server:
        await server.ok(PATH, body())
        sampling = server.scheduler.submits[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (1.0, 0)
    assert as_i32(sampling.end_ids).tolist() == [9]


async def test_logprobs_of_the_prompt(server: WebServer) -> None:
    answer = await server.ok(PATH, body({"prompt_logprobs": 1, "max_tokens": 1}))
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip(IDS[1:], rest, strict=True):
        assert entry[str(token_id)]["logprob"] == pytest.approx(-0.1 - token_id % 2 - token_id / 1000)
        assert entry[str(token_id)]["rank"] >= 1


async def test_a_stop_string_needs_text_and_a_stop_id_does_not(server: WebServer) -> None:
    (choice,) = (await server.ok(PATH, body({"max_tokens": 8})))["choices"]
    third = choice["token_ids"][2]
    (choice,) = (await server.ok(PATH, body({"max_tokens": 8, "stop_token_ids": [third], "detokenize": False})))[
        "choices"
    ]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", third, third)
    text = server.tokenizer.decode(choice["token_ids"], continues=True)
    (choice,) = (await server.ok(PATH, body({"max_tokens": 8, "stop": text[-1]})))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[-1])
    error = await server.error(PATH, body({"stop": "x", "detokenize": False}))
    assert error["param"] == "sampling_params.detokenize"


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_a_stream(server: WebServer, mode: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    sampling = {"n": 2, "logprobs": 0, "max_tokens": 6}
    asked = body(sampling, output_mode=mode, return_token_ids=True, stream_options=options, request_id="it")
    *events, last = await server.events(PATH, asked)
    assert [event.get("prompt_token_ids") for event in events] == [IDS] + [None] * (len(events) - 1)
    assert {event["request_id"] for event in events} == {"it"}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    for sample in range(2):
        own = [(event, event["choices"][0]) for event in events if event["choices"][0]["index"] == sample]
        ids = [token_id for _, choice in own for token_id in choice["token_ids"]]
        logged = [entry["token_id"] for _, choice in own for entry in choice["logprobs"]["content"]]
        assert ids == logged == drawn(server, sample, 6)
        assert [choice["finish_reason"] for _, choice in own] == [None] * (len(own) - 1) + ["length"]
        assert [event["usage"]["completion_tokens"] for event, _ in own][-1] == 6
        if mode == "text":
            text = "".join(choice["text"] for _, choice in own)
            assert text == server.tokenizer.decode(ids, continues=True)
        else:
            assert not any("text" in choice for _, choice in own)


async def test_a_salt_and_a_priority(server: WebServer) -> None:
    await server.ok(PATH, body(cache_salt="a", priority=-3))
    first = server.scheduler.submits[-1]
    await server.ok(PATH, body(cache_salt="b"))
    assert first.priority == -3
    assert 0 != first.salt != server.scheduler.submits[-1].salt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [400]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"structured_outputs": {"regex": ""}}}, "sampling_params.structured_outputs.regex"),
        ({"sampling_params": {"structured_outputs": {}}}, "structured_outputs"),
        ({"sampling_params": {"trace_decode_token_ids": [5]}}, "sampling_params.trace_decode_token_ids"),
        ({"sampling_params": {"nonsense": 1}}, "sampling_params.nonsense"),
        ({"sampling_params": {"max_tokens": 1000}}, "max_tokens"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "sampling_params.detokenize"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_what_cannot_be_answered_is_named(server: WebServer, fields: dict[str, Any], param: str) -> None:
    assert (await server.error(PATH, body() | fields))["param"] == param
    assert not server.scheduler.submits


async def test_values_that_ask_for_nothing_are_taken(server: WebServer) -> None:
    sampling = {"bad_words": [], "extra_args": {}, "skip_reading_prefix_cache": False, "flat_logprobs": False}
    await server.ok(PATH, body(sampling | {"logits": None}, kv_transfer_params=None, features=None))


async def test_another_model() -> None:
    async with web_server() as server:
        assert (await server.error(PATH, body(model="other"), 404))["param"] == "model"


async def test_equal_logprobs_at_every_route(server: WebServer) -> None:
    tokens = await server.ok(PATH, body({"logprobs": 0}))
    completion = await server.ok("/v1/completions", {"prompt": [IDS], "max_tokens": 4, "seed": 1, "logprobs": 0})
    content = tokens["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == completion["choices"][0]["logprobs"]["token_logprobs"]


async def test_a_failure_in_a_stream() -> None:
    scheduler = FakeScheduler()
    scheduler.fail_with = "no room"
    async with web_server(scheduler) as server:
        assert "no room" in (await server.error(PATH, body(stream=True)))["message"]
