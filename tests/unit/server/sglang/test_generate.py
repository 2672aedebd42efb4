from __future__ import annotations

from typing import Any

import pytest

from tests.drivers.until import until
from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import random_tokens
from toka_async.arrays import as_i32
from toka_async.checkpoint.generation import GenerationDefaults
from toka_async.server.http.respond import SERVICE

PATH = "/generate"
IDS = [72, 101, 108, 108, 111]
END = 9


def body(sampling: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4} | (sampling or {}), **fields}


def logprob(token_id: int) -> Any:
    """The fake model's."""
    return pytest.approx(-0.1 - token_id % 2 - token_id / 1000)


async def test_one_prompt_is_one_sample(server: WebServer) -> None:
    answer = await server.ok(PATH, body(rid="mine", session_id="s"))
    ids = random_tokens(server.scheduler.submits[-1], 0)[:4]
    assert answer.keys() == {"text", "output_ids", "meta_info"}
    assert answer["output_ids"] == ids
    assert answer["text"] == server.tokenizer.decode(ids, continues=True)
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": 4}],
    }


async def test_a_text_is_tokenized(server: WebServer) -> None:
    answer = await server.ok(PATH, {"text": "Question:", "return_prompt_token_ids": True})
    assert answer["prompt_token_ids"] == server.tokenizer.encode("Question:")
    assert answer["meta_info"]["completion_tokens"] == 128


async def test_logprobs_of_the_sample(server: WebServer) -> None:
    answer = await server.ok(PATH, body(return_logprob=True))
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[logprob(each), each, None] for each in answer["output_ids"]]
    assert meta["output_token_logprobs_length"] == 4
    assert "output_top_logprobs" not in meta


@pytest.mark.parametrize("start", [0, 2, 5])
async def test_logprobs_of_the_prompt(server: WebServer, start: int) -> None:
    fields = body(return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True, logprob_start_len=start)
    meta = (await server.ok(PATH, fields))["meta_info"]
    text = server.tokenizer.token_text
    expected = [[None if place == start else logprob(each), each, text(each)] for place, each in enumerate(IDS)]
    assert meta["input_token_logprobs"] == expected[start:]
    top = meta["input_top_logprobs"]
    assert [entry is None for entry in top] == [True] * (start < 5) + [False] * max(0, 4 - start)
    assert all(len(entry) == 2 for entry in top[1:])
    assert [len(entry) for entry in meta["output_top_logprobs"]] == [2] * 4


async def test_every_end_is_named() -> None:
    async with web_server(defaults=GenerationDefaults(eos_token_ids=(END,))) as server:
        server.scheduler.script = lambda _submit, _sample: [70, 71, 72, END] * 8
        for sampling, finish in (
            ({"max_new_tokens": 8}, {"type": "stop", "matched": END}),
            ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
            ({"stop_token_ids": [71]}, {"type": "stop", "matched": 71}),
            ({"stop": server.tokenizer.decode([72])}, {"type": "stop", "matched": server.tokenizer.decode([72])}),
            ({"max_new_tokens": 6, "ignore_eos": True}, {"type": "length", "length": 6}),
        ):
            assert (await server.ok(PATH, body(sampling)))["meta_info"]["finish_reason"] == finish


async def test_stops_stay_in_the_text_where_asked_for(server: WebServer) -> None:
    server.scheduler.script = lambda _submit, _sample: [70, 71, 72] * 8
    stop = server.tokenizer.decode([71], continues=True)
    trimmed = await server.ok(PATH, body({"stop": [stop], "spaces_between_special_tokens": False}))
    whole = await server.ok(PATH, body({"stop": [stop], "no_stop_trim": True}))
    assert trimmed["output_ids"] == whole["output_ids"] == [70, 71]
    assert whole["text"] == trimmed["text"] + stop


async def test_many_prompts_with_many_samples_are_a_list_by_prompt(server: WebServer) -> None:
    answer = await server.ok(PATH, body({"n": 2}, input_ids=[IDS, [5]], rid="r", return_prompt_token_ids=True))
    submits = server.scheduler.submits
    expected = [random_tokens(submit, sample)[:4] for submit in submits for sample in range(2)]
    assert [sample["output_ids"] for sample in answer] == expected
    assert [sample["prompt_token_ids"] for sample in answer] == [IDS, IDS, [5], [5]]
    assert [sample["meta_info"]["id"] for sample in answer] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
    assert len(await server.ok(PATH, body({"n": 2}))) == 2
    assert len(await server.ok(PATH, body(input_ids=[IDS]))) == 1


async def test_prompts_may_want_different_things(server: WebServer) -> None:
    samplings = [{"max_new_tokens": 2}, {"max_new_tokens": 3, "temperature": 0}, {"max_new_tokens": 2}]
    fields = {"return_logprob": [True, False, True], "top_logprobs_num": [1, 0, 1], "rid": ["a", "b", "c"]}
    prompts = [[5], [6], [7]]
    answer = await server.ok(PATH, {"input_ids": prompts, "sampling_params": samplings, **fields})
    assert [sample["meta_info"]["completion_tokens"] for sample in answer] == [2, 3, 2]
    assert [sample["meta_info"]["id"] for sample in answer] == ["a", "b", "c"]
    assert ["output_top_logprobs" in sample["meta_info"] for sample in answer] == [True, False, True]
    by_prompt = {as_i32(submit.prompt).tolist()[0]: submit for submit in server.scheduler.submits}
    assert [by_prompt[each].sampling.temperature for each in (5, 6, 7)] == [1.0, 0.0, 1.0]
    for sample, (prompt,) in zip(answer, prompts, strict=True):
        count = sample["meta_info"]["completion_tokens"]
        assert sample["output_ids"] == random_tokens(by_prompt[prompt], 0)[:count]


async def test_a_stream_says_everything_so_far(server: WebServer) -> None:
    events = await server.events(PATH, body(return_logprob=True, logprob_start_len=3))
    *parts, last = events
    ids = random_tokens(server.scheduler.submits[-1], 0)[:4]
    assert last["output_ids"] == ids
    for event in events:
        count = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == ids[:count]
        assert [entry[1] for entry in event["meta_info"]["output_token_logprobs"]] == ids[:count]
        assert event["meta_info"]["input_token_logprobs"] == [[None, 108, None], [logprob(111), 111, None]]
        assert "index" not in event
    assert all(event["meta_info"]["finish_reason"] is None for event in parts)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert last["text"] == server.tokenizer.decode(ids, continues=True)


async def test_a_stream_of_many_has_indices(server: WebServer) -> None:
    events = await server.events(PATH, body({"n": 2}, input_ids=[[5], [6]]))
    lasts = {event["index"]: event for event in events}
    expected = [random_tokens(submit, sample)[:4] for submit in server.scheduler.submits for sample in range(2)]
    assert [lasts[index]["output_ids"] for index in range(4)] == expected


async def test_the_engine_gets_sglangs_meaning(server: WebServer) -> None:
    sampling = {"top_k": -1, "sampling_seed": 7, "min_new_tokens": 2, "temperature": 3, "logit_bias": {"5": -1}}
    await server.ok(PATH, body(sampling, priority=2, cache_salt="a"))
    first = server.scheduler.submits[-1]
    assert (first.seed, first.priority, first.sampling.top_k, first.sampling.min_tokens) == (7, -2, 0, 2)
    assert first.sampling.temperature == 3
    await server.ok(PATH, body(cache_salt="a", extra_key="b"))
    assert server.scheduler.submits[-1].salt not in (0, first.salt)


async def test_the_models_sampling_defaults_do_not_hold() -> None:
    async with web_server(defaults=GenerationDefaults(temperature=0.5, top_p=0.3)) as server:
        await server.ok(PATH, body())
        sampling = server.scheduler.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"text": "x"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], 6]}, "input_ids"),
        ({"input_ids": [5, [6]]}, "input_ids"),
        ({"input_ids": [400]}, "input_ids"),
        ({"input_ids": None, "text": ""}, "text"),
        ({"sampling_params": {"max_new_tokens": 1000}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"regex": "a\\"}}, "sampling_params.regex"),
        ({"sampling_params": [{"ebnf": "?"}]}, "sampling_params[0].ebnf"),
        ({"sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"sampling_params": {"structural_tag": "{}"}}, "sampling_params.structural_tag"),
        (
            {"sampling_params": {"custom_params": {"thinking_budget": 5}}},
            "sampling_params.custom_params.thinking_budget",
        ),
        (
            {"input_ids": [[5], [6]], "sampling_params": [{}, {"min_new_tokens": 9, "max_new_tokens": 1}]},
            "sampling_params[1].min_new_tokens",
        ),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params.a"),
        ({"sampling_params": {"nonsense": 1}}, "sampling_params.nonsense"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"sampling_params": [{"json_schema": 5}]}, "sampling_params[0].json_schema"),
        ({"input_ids": [[5], [6]], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"input_ids": [[5], [6]], "return_logprob": [True]}, "return_logprob"),
        ({"input_ids": [[5], [6]], "return_logprob": [True, False], "stream": True}, "stream"),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "rid"),
        ({"return_logprob": True, "logprob_start_len": 6}, "logprob_start_len"),
        ({"token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"image_data": "x.png"}, "image_data"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"lora_path": "x"}, "lora_path"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_what_cannot_be_answered_is_named(server: WebServer, fields: dict[str, Any], param: str) -> None:
    assert (await server.error(PATH, body() | fields))["param"] == param
    assert not server.scheduler.submits


async def test_a_grammar_is_checked_while_its_request_runs(server: WebServer) -> None:
    """What is found out afterwards is cancelled; what is known by then is not submitted."""
    fields = {"input_ids": [[5], [6]], "sampling_params": [{}, {"regex": "a("}]}
    for _ in range(2):
        error = await server.error(PATH, body() | fields)
        assert error["param"] == "sampling_params[1].regex"
        assert error["message"].startswith("'sampling_params[1].regex' cannot be enforced")
    assert len(server.scheduler.submits) == 2
    await until(lambda: not server.engine.busy)


async def test_the_answers_of_all_parts_count(server: WebServer) -> None:
    async with web_server(max_answer_mb=1) as server:
        samplings = [{"max_new_tokens": 100, "sampling_seed": seed} for seed in range(12)]
        fields = {"return_logprob": True, "top_logprobs_num": 20}
        error = await server.error(PATH, {"input_ids": [[5]] * 12, "sampling_params": samplings, **fields})
    assert error["code"] == "answer_too_large"


async def test_parts_need_room_together() -> None:
    """Nothing of a request runs that cannot run whole: two requests could wait for each other's halves."""
    async with web_server(max_requests=3) as server:
        asked = {
            "input_ids": [[5], [6], [7], [8]],
            "sampling_params": [{"max_new_tokens": each} for each in (1, 2, 3, 4)],
        }
        assert (await server.error(PATH, asked))["param"] == "input_ids"
    async with web_server(max_held_tokens=20) as server:
        asked = {"input_ids": [[5], [6]], "sampling_params": [{"max_new_tokens": 8}, {"max_new_tokens": 12}]}
        await server.error(PATH, asked)
        assert not server.scheduler.submits
        await server.ok(PATH, asked | {"sampling_params": [{"max_new_tokens": 8}, {"max_new_tokens": 10}]})
        assert server.app[SERVICE].accounts.total.num_tokens == 0
