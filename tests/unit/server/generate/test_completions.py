from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.cases import tokenizers as small
from tests.drivers.web_server import NAME, WebServer, web_server
from tests.fakes.scheduler import FakeScheduler, random_tokens
from toka_async.arrays import as_i32
from toka_async.messages import EndSample, StopMask
from toka_async.server.engine.engine import MOST_SUBMITTED
from toka_async.text.tokenizer import Tokenizer

PATH = "/v1/completions"
TEXT = "Question: what is the answer? Answer: the answer is 42. Question: the end"


def says(text: str, build: Callable[[], Tokenizer] = small.byte_level, end: bool = False) -> FakeScheduler:
    """A model that says `text` whatever the prompt, and then perhaps its end token."""
    tokenizer = build()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.eos_token_id is not None
    ends = [tokenizer.eos_token_id] * 400 if end else ids * 10
    return FakeScheduler(lambda _submit, _sample: ids + ends)


async def test_a_completion(server: WebServer) -> None:
    answer = await server.ok(PATH, {"model": NAME, "prompt": "Question: what", "max_tokens": 5, "seed": 1})
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == NAME
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    num_prompt = len(server.tokenizer.encode("Question: what"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": num_prompt // 16 * 16},
    }


async def test_sixteen_tokens_unless_told_otherwise(server: WebServer) -> None:
    answer = await server.ok(PATH, {"prompt": "x"})
    assert answer["usage"]["completion_tokens"] == 16


async def test_prompts_times_n(server: WebServer) -> None:
    body = {"prompt": ["the", "the", "end"], "n": 2, "max_tokens": 8, "seed": 5, "return_token_ids": True}
    answer = await server.ok(PATH, body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 6  # equal prompts differ too
    submits = server.scheduler.submits
    assert [submit.n for submit in submits] == [2, 2, 2]
    assert submits[0].seed == 5
    for prompt, submit in enumerate(submits):
        expected = [random_tokens(submit, sample) for sample in range(2)]
        assert [choice["token_ids"] for choice in answer["choices"][2 * prompt : 2 * prompt + 2]] == expected
    assert answer["usage"]["completion_tokens"] == 48
    assert answer["usage"]["prompt_tokens"] == sum(len(as_i32(submit.prompt)) for submit in submits)


async def test_a_seed_reproduces(server: WebServer) -> None:
    body = {"prompt": "x", "n": 2, "seed": -7}
    first, second = await server.ok(PATH, body), await server.ok(PATH, body)
    assert first["choices"] == second["choices"]
    unseeded = [(await server.ok(PATH, {"prompt": "x"}))["choices"] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
async def test_token_ids_are_taken_as_they_are(server: WebServer, prompt: list[Any]) -> None:
    await server.ok(PATH, {"prompt": prompt, "max_tokens": 1})
    submits = server.scheduler.submits
    expected = prompt if isinstance(prompt[0], list) else [prompt]
    assert [as_i32(submit.prompt).tolist() for submit in submits] == expected


async def test_special_tokens_of_the_prompt() -> None:
    async with web_server(tokenizer=small.byte_fallback()) as server:
        await server.ok(PATH, {"prompt": "", "max_tokens": 1})  # not empty: the tokenizer puts <s> there
        await server.ok(PATH, {"prompt": "the", "max_tokens": 1, "add_special_tokens": False})
        first, second = server.scheduler.submits
        assert as_i32(first.prompt)[0] == server.tokenizer.bos_token_id
        assert server.tokenizer.bos_token_id not in as_i32(second.prompt)


async def test_the_end_token_has_no_text() -> None:
    async with web_server(says("the answer", end=True)) as server:
        answer = await server.ok(PATH, {"prompt": "x", "max_tokens": 100, "return_token_ids": True})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the answer", "stop", None)
        assert choice["token_ids"][-1] == server.tokenizer.eos_token_id
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
        ignored = await server.ok(PATH, {"prompt": "x", "max_tokens": 100, "ignore_eos": True})
        assert ignored["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_token_ids(stream: bool) -> None:
    async with web_server(says("the answer")) as server:
        ids = server.tokenizer.encode("the answer", add_special_tokens=False)
        whole = [server.tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
        last = next(place for place in range(len(ids)) if ids[place] not in ids[:place] and place > 0)
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 100, "stop_token_ids": [ids[last]]}
        for include, text in ((False, whole[last]), (True, whole[last + 1])):
            body["include_stop_str_in_output"] = include
            (choice,) = await choices_of(server, body, stream)
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", ids[last])


async def choices_of(server: WebServer, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """The choices, those of a stream put together."""
    if not stream:
        answer: dict[str, Any] = await server.ok(PATH, body)
        choices: list[dict[str, Any]] = answer["choices"]
        return choices
    merged: dict[int, dict[str, Any]] = {}
    for event in await server.events(PATH, body):
        for choice in event["choices"]:
            one = merged.setdefault(choice["index"], {"text": "", "token_ids": [], "finish_reason": None})
            assert one["finish_reason"] is None, "a chunk after the end"
            one["text"] += choice["text"]
            one["token_ids"] += choice.get("token_ids", [])
            one |= {name: choice[name] for name in ("index", "finish_reason", "stop_reason")}
            if choice["logprobs"] is not None:
                lists = one.setdefault("logprobs", {name: [] for name in choice["logprobs"]})
                for name, values in choice["logprobs"].items():
                    lists[name] += values
    return [merged[index] for index in sorted(merged)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("answer?", ("Question: what is the ", "answer?")),
        (["42. Quest", "zzz"], ("Question: what is the answer? Answer: the answer is ", "42. Quest")),
        (["swer: ", "r? A"], ("Question: what is the answe", "r? A")),
        ("Q", ("", "Q")),
    ],
)
async def test_stop_strings(stream: bool, include: bool, stop: str | list[str], expected: tuple[str, str]) -> None:
    before, found = expected
    async with web_server(says(TEXT)) as server:
        body = {"prompt": "x", "max_tokens": 200, "stop": stop, "n": 2, "return_token_ids": True}
        body["include_stop_str_in_output"] = include
        for choice in await choices_of(server, body, stream):
            assert choice["text"] == before + found * include
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", found)
            decoded = server.tokenizer.decode(choice["token_ids"])
            assert before + found in decoded
            assert before + found not in server.tokenizer.decode(choice["token_ids"][:-1])
        ends = [message for message in server.scheduler.log if isinstance(message, EndSample)]
        assert len(ends) == 2
        assert not server.scheduler.cancelled
        await server.engine.wait_idle()
        assert not server.scheduler.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_no_stop_string_within_min_tokens(stream: bool) -> None:
    async with web_server(says(TEXT)) as server:
        ids = server.tokenizer.encode(TEXT)
        body = {
            "prompt": "x",
            "max_tokens": 200,
            "stop": "answer",
            "min_tokens": len(ids) // 2,
            "return_token_ids": True,
        }
        (choice,) = await choices_of(server, body, stream)
        assert choice["text"] == "Question: what is the answer? Answer: the "


async def test_a_stop_set_is_sent_once() -> None:
    async with web_server(says(TEXT)) as server:
        for stop in (["a?", "b"], ["b", "a?"], "a?"):
            await server.ok(PATH, {"prompt": "x", "stop": stop})
        masks = [message for message in server.scheduler.log if isinstance(message, StopMask)]
        assert [mask.stop_id for mask in masks] == [0, 1]
        assert len(masks[0].mask) == 400


async def test_a_stop_at_the_very_end() -> None:
    """The sample ends by length with the token that completes the string: nobody is asked, the text is cut anyway."""
    async with web_server(says("the answer is 42.")) as server:
        ids = server.tokenizer.encode("the answer is 42.")
        body = {"prompt": "x", "max_tokens": len(ids), "stop": "42."}
        (choice,) = (await server.ok(PATH, body))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("the answer is ", "stop")


async def test_echo(server: WebServer) -> None:
    prompt = "Question: what is the answer?"
    ids = server.tokenizer.encode(prompt)
    for given in (prompt, ids):
        answer = await server.ok(PATH, {"prompt": given, "echo": True, "max_tokens": 0, "logprobs": 2})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == prompt
        assert [len(values) for values in logprobs.values()] == [len(ids)] * 4
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
        assert logprobs["text_offset"][0] == 0
        for token, (start, end) in zip(
            logprobs["tokens"], pairwise([*logprobs["text_offset"], len(prompt)]), strict=True
        ):
            assert prompt[start:end] == token
        assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_and_completion(stream: bool) -> None:
    async with web_server(says("the answer")) as server:
        body = {"prompt": ["what", "is"], "echo": True, "max_tokens": 3, "logprobs": 1, "n": 2}
        choices = await choices_of(server, body, stream)
        completion = server.tokenizer.decode((server.tokenizer.encode("the answer") * 10)[:3])
        assert [choice["text"] for choice in choices] == [given + completion for given in ("what", "what", "is", "is")]
        for choice in choices:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert choice["logprobs"]["text_offset"][-1] < len(choice["text"])
            assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_counts_for_each_choice(stream: bool) -> None:
    """Six kilobytes could ask for gigabytes; in what is held and in the answer's size, it is n times the prompt."""
    body = {"prompt": [5] * 500, "max_tokens": 0, "n": 100, "echo": True, "logprobs": 20, "stream": stream}
    async with web_server(max_answer_mb=1, max_held_tokens=10_000) as server:
        error = await server.error(PATH, body)
        assert (error["param"], error["code"]) == ("n", "answer_too_large")
        error = await server.error(PATH, {**body, "logprobs": 0, "n": 21})
        assert "10000 tokens" in error["message"]
        choices = await choices_of(server, {**body, "logprobs": 0, "n": 20}, stream)
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [500] * 20


async def test_choices_of_a_prompt_have_the_same_log_probs_of_it(server: WebServer) -> None:
    body = {"prompt": [[10, 12, 15], [20]], "max_tokens": 2, "n": 3, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    choices = (await server.ok(PATH, body))["choices"]
    for start, length in ((0, 3), (3, 1)):
        of_prompt = [choice["prompt_logprobs"] for choice in choices[start : start + 3]]
        echoed = [
            {name: each[:length] for name, each in choice["logprobs"].items()} for choice in choices[start : start + 3]
        ]
        assert of_prompt == [of_prompt[0]] * 3
        assert echoed == [echoed[0]] * 3
        assert {len(each) for choice in choices[start : start + 3] for each in choice["logprobs"].values()} == {
            length + 2
        }
    assert len({str(choice["logprobs"]["tokens"]) for choice in choices}) == 6


async def test_loglikelihood_as_lm_eval_computes_it(server: WebServer) -> None:
    """lm-evaluation-harness: token-id prompts, echo, one token more, logprobs 1; greedy where the chosen is the top."""
    context, continuation = [10, 12], [14, 16]  # even ids are the fake model's choice
    for ids, greedy in ((context + continuation, True), ([10, 12, 14, 15], False)):
        body = {"prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
        logprobs = (await server.ok(PATH, body))["choices"][0]["logprobs"]
        tokens = logprobs["token_logprobs"][len(context) : -1]
        tops = logprobs["top_logprobs"][len(context) : -1]
        assert sum(tokens) == pytest.approx(sum(-0.1 - each % 2 - each / 1000 for each in ids[2:]))
        assert all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True)) is greedy


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 3])
async def test_logprobs(server: WebServer, stream: bool, num_top: int) -> None:
    body = {"prompt": "x", "max_tokens": 20, "logprobs": num_top, "seed": 3, "return_token_ids": True}
    (choice,) = await choices_of(server, body, stream)
    logprobs, ids = choice["logprobs"], choice["token_ids"]
    assert logprobs["token_logprobs"] == pytest.approx([-0.1 - each % 2 - each / 1000 for each in ids])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) in (max(num_top, 1), num_top + 1)
    assert logprobs["text_offset"][0] == 0
    assert max(logprobs["text_offset"]) <= len(choice["text"])


async def test_prompt_logprobs(server: WebServer) -> None:
    answer = await server.ok(PATH, {"prompt": [10, 12, 15], "max_tokens": 1, "prompt_logprobs": 1})
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "12": {"logprob": pytest.approx(-0.112), "rank": 1, "decoded_token": server.tokenizer.token_text(12)}
    }
    assert third.keys() == {"15", "16"}
    assert (third["15"]["rank"], third["16"]["rank"]) == (16, 1)


async def test_a_single_token_has_no_prompt_logprobs(server: WebServer) -> None:
    body = {"prompt": [10], "max_tokens": 1, "prompt_logprobs": 1, "echo": True, "logprobs": 1}
    (choice,) = (await server.ok(PATH, body))["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == 2


async def test_sampling_reaches_the_engine(server: WebServer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.1, "presence_penalty": 1.0}
    more = {"frequency_penalty": -1.0, "repetition_penalty": 1.5, "min_tokens": 2}
    await server.ok(PATH, {"prompt": "x", "priority": -3, **fields, **more})
    (submit,) = server.scheduler.submits
    assert {name: getattr(submit.sampling, name) for name in fields | more} == fields | more
    assert submit.priority == -3


@pytest.mark.parametrize("build", [small.byte_level, small.byte_fallback, small.metaspace])
@pytest.mark.parametrize("text", ["你好，世界！今天你好吗", "👩‍👩‍👧‍👦 😀😃", " the answer is\n"])
async def test_streamed_text_is_the_whole_text(build: Callable[[], Tokenizer], text: str) -> None:
    async with web_server(says(text, build), tokenizer=build()) as server:
        length = len(server.tokenizer.encode(text, add_special_tokens=False))
        for max_tokens in range(1, length + 1):
            body = {"prompt": "the", "max_tokens": max_tokens, "stop": ["zz", "！", "\n\n"]}
            (whole,) = await choices_of(server, body, False)
            (streamed,) = await choices_of(server, body, True)
            assert streamed["text"] == whole["text"]
            assert streamed["finish_reason"] == whole["finish_reason"]


async def test_a_heavy_response(server: WebServer) -> None:
    """Many samples are put together in a thread."""
    answer = await server.ok(PATH, {"prompt": "x", "n": 300, "max_tokens": 4, "logprobs": 2, "seed": 2})
    assert len(answer["choices"]) == 300
    assert answer["usage"]["completion_tokens"] == 1200
    assert all(len(choice["logprobs"]["tokens"]) == 4 for choice in answer["choices"])


@pytest.mark.parametrize("name", [NAME, "", "default", "none", None])
async def test_names_of_the_model_that_is_served(server: WebServer, name: str | None) -> None:
    assert (await server.ok(PATH, {"model": name, "prompt": "x", "max_tokens": 1}))["model"] == NAME


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 5])
async def test_the_model_s_own_end_token_is_text_where_ends_are_kept(n: int, stream: bool, include: bool) -> None:
    async with web_server(says("the end", end=True)) as server:
        fields = {"include_stop_str_in_output": include, "skip_special_tokens": False}
        end = server.tokenizer.token_text(server.tokenizer.eos_token_id or 0)
        choices = await choices_of(server, {"prompt": "x", "max_tokens": 40, "n": n, **fields}, stream)
        assert len(choices) == n
        for choice in choices:
            assert (choice["text"], choice["finish_reason"]) == ("the end" + end * include, "stop")


async def test_token_ids_of_prompts(server: WebServer) -> None:
    body = {"prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 3, "return_token_ids": True}
    choices = (await server.ok(PATH, body))["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6, 7], [5, 6, 7], [8], [8]]
    firsts: dict[int, Any] = {}
    for event in await server.events(PATH, body):
        (choice,) = event["choices"]
        assert ("prompt_token_ids" in choice) == (choice["index"] not in firsts)
        firsts.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert firsts == {0: [5, 6, 7], 1: [5, 6, 7], 2: [8], 3: [8]}


@pytest.mark.parametrize("n", [1, 5])
async def test_chunks_whose_size_says_nothing(server: WebServer, n: int) -> None:
    body = {"prompt": "x", "n": n, "max_tokens": 9, "seed": 2}
    plain = await choices_of(server, body, True)
    events = await server.events(PATH, {**body, "stream_options": {"include_obfuscation": True}})
    texts = [""] * n
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        shown = json.dumps(choice["text"], ensure_ascii=False).encode()
        assert (len(shown) + len(event["obfuscation"])) % 32 == 0
    assert texts == [choice["text"] for choice in plain]


@pytest.mark.parametrize("n", [1, 5])
async def test_usage_in_every_chunk(server: WebServer, n: int) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True, "include_obfuscation": False}
    body = {"prompt": [5, 6, 7], "n": n, "max_tokens": 3, "stream_options": options}
    *events, last = await server.events(PATH, body)
    counts: dict[int, list[int]] = {index: [] for index in range(n)}
    for event in events:
        usage = event["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (3, 3 + usage["completion_tokens"])
        counts[event["choices"][0]["index"]].append(usage["completion_tokens"])
    assert all(each == sorted(each) and each[-1] == 3 for each in counts.values())
    assert last["usage"]["completion_tokens"] == 3 * n


@pytest.mark.parametrize("side", ["left", "right"])
async def test_truncated_prompts(server: WebServer, side: str) -> None:
    body = {"max_tokens": 2, "echo": True, "truncate_prompt_tokens": 3, "truncation_side": side}
    ids = server.tokenizer.encode(TEXT)
    kept = ids[-3:] if side == "left" else ids[:3]
    answer = await server.ok(PATH, {**body, "prompt": TEXT})
    assert answer["usage"]["prompt_tokens"] == 3
    (submit,) = server.scheduler.submits
    assert as_i32(submit.prompt).tolist() == kept
    assert answer["choices"][0]["text"].startswith(server.tokenizer.decode(kept))
    fitting = await server.ok(PATH, {"prompt": list(range(400)) * 2, "max_tokens": 12, "truncate_prompt_tokens": -1})
    assert fitting["usage"]["prompt_tokens"] == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 2])
async def test_tokens_named_by_their_ids(server: WebServer, stream: bool, num_top: int) -> None:
    fields = {"logprobs": num_top, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = await choices_of(server, {"prompt": "x", "max_tokens": 4, **fields}, stream)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)


async def test_allowed_token_ids_reach_the_engine(server: WebServer) -> None:
    await server.ok(PATH, {"prompt": "x", "max_tokens": 1, "allowed_token_ids": [9, 4]})
    (submit,) = server.scheduler.submits
    assert as_i32(submit.sampling.allowed_ids).tolist() == [4, 9]


@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"stop": ["zzz"]}, {"echo": True}])
async def test_a_request_of_many_prompts(fields: dict[str, object]) -> None:
    """Every choice is there, in order, and others are answered before it is."""
    num = 2 * MOST_SUBMITTED + 1
    async with web_server(FakeScheduler(held=True)) as server:
        body = {"prompt": [[1, 2, index % 200] for index in range(num)], "max_tokens": 2, **fields}
        answer = asyncio.create_task(server.ok("/v1/completions", body))
        while server.engine.num_requests < num:
            assert (await server.get("/ping"))[0] == 200
        while not answer.done():
            server.scheduler.step()
            await asyncio.sleep(0.001)
        choices = answer.result()["choices"]
        assert [choice["index"] for choice in choices] == list(range(num * int(str(fields.get("n", 1)))))
        assert not server.engine.busy
