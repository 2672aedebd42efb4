"""Tool calls and reasoning as clients get them, whole and streamed, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import tokenizers

from tests.cases.tokenizers import NAMES, byte_level
from tests.drivers.answering import CALL, TEMPLATE, answering, prompt
from tests.drivers.web_server import NAME, WebServer
from toka_async.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
DASHED = {"type": "function", "function": {"name": "not-python"}}
LOOKING = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "pattern": "^(?=x).*$"}}}}
LOOKING_STRICTLY = {"type": "function", "function": {**LOOKING, "strict": True}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


@asynccontextmanager
async def client_of(server: WebServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_whole() -> None:
    async with answering() as server, client_of(server) as client:
        answer = await client.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS)
        assert prompt(server).startswith('[{"type": "function", "function": {"name": "weather", "description": "of')
    (choice,) = answer.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "I look."
    assert message.model_extra == {"reasoning_content": "Let me see.", "reasoning": "Let me see."}
    assert message.tool_calls is not None
    assert len({call.id for call in message.tool_calls}) == 2
    found = [
        (each.function.name, json.loads(each.function.arguments))
        for each in message.tool_calls
        if each.type == "function"
    ]
    assert found == [("weather", {"city": "Köln"}), ("time", {})]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"stream_options": {"include_usage": True}}])
async def test_streamed_samples_are_whole_ones(fields: dict[str, Any]) -> None:
    """Through the client's own accumulation, which checks ids, indices and order."""
    async with answering() as server, client_of(server) as client:
        asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "n": 3, **fields}
        async with client.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            answer = await stream.get_final_completion()
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert (choice.message.model_extra or {})["reasoning_content"] == "Let me see."
        assert [call.function.name for call in choice.message.tool_calls or ()] == ["weather", "time"]
        assert next(iter(choice.message.tool_calls or ())).function.arguments == '{"city":"Köln"}'
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(done) == 6


async def test_a_call_that_is_known_at_the_end_alone_is_a_delta_before_it() -> None:
    """OpenAI's client drops its event of a call that comes in one chunk with the finish reason."""
    text = '{"name": "weather", "parameters": {"city": "Bonn"}}'
    async with answering(text, tool_format="llama3_json") as server, client_of(server) as client:
        asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "stop": ["}}"]}
        asked |= {"extra_body": {"include_stop_str_in_output": True}}
        async with client.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            answer = await stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == ['{"city":"Bonn"}']
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_deltas_of_calls_are_whole() -> None:
    async with answering() as server:
        events = await server.events(PATH, {"messages": MESSAGES, "tools": TOOLS})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in calls] == [
        (0, "function", "weather"),
        (1, "function", "time"),
    ]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me see."
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert "<" not in "".join(delta.get("content", "") for delta in deltas)
    assert not any(
        delta == {} and event["choices"][0]["finish_reason"] is None
        for delta, event in zip(deltas, events, strict=True)
    )


@pytest.mark.parametrize(
    ("choice", "shown", "called"),
    [
        ("auto", ["weather", "time"], ["weather", "time"]),
        ("none", [], []),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]},
            },
            ["time"],
            ["time"],
        ),
    ],
)
async def test_choices(choice: Any, shown: list[str], called: list[str]) -> None:
    async with answering() as server:
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
        answer = await server.ok(PATH, body)
        assert [name for name in ("weather", "time") if f'"name": "{name}"' in prompt(server)] == shown
    calls = answer["choices"][0]["message"].get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == called
    content = answer["choices"][0]["message"]["content"]
    assert (CALL in content) == ("weather" not in called)


async def test_one_call_at_most() -> None:
    async with answering() as server:
        answer = await server.ok(PATH, {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False})
    assert [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["weather"]


async def test_calls_alone_have_no_content() -> None:
    async with answering(CALL) as server:
        answer = await server.ok(PATH, {"messages": MESSAGES, "tools": TOOLS})
    assert answer["choices"][0]["message"]["content"] is None


async def test_a_call_of_plain_text_that_is_cut_off_is_content() -> None:
    """Arguments that came before the cut are not all of them."""
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    async with answering(text + "</function>", tool_format="qwen3_coder") as server:
        for max_tokens, is_cut in ((len(server.tokenizer.encode(text)), True), (200, False)):
            body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": max_tokens}
            (whole,) = (await server.ok(PATH, body))["choices"]
            choices = [event["choices"][0] for event in await server.events(PATH, body)]
            assert [choices[-1]["finish_reason"], whole["finish_reason"]] == ["length" if is_cut else "tool_calls"] * 2
            deltas = [choice["delta"] for choice in choices]
            assert "".join(delta.get("content") or "" for delta in deltas) == (text.strip() if is_cut else "")
            assert whole["message"]["content"] == (text.strip() if is_cut else None)
            calls = [call["function"] for call in whole["message"].get("tool_calls", ())]
            assert calls == [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
            assert calls == ([] if is_cut else [{"name": "weather", "arguments": '{"city":"Köln"}'}])


async def test_reasoning_that_is_cut_off_stays_reasoning() -> None:
    async with answering("It is long") as server:
        body = {"messages": MESSAGES, "chat_template_kwargs": {"thinks": True}, "max_tokens": 5}
        whole = await server.ok(PATH, body)
        events = await server.events(PATH, body)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning"]
    streamed = "".join(event["choices"][0]["delta"].get("reasoning", "") for event in events)
    assert streamed == choice["message"]["reasoning"]


async def test_reasoning_may_be_left_out() -> None:
    async with answering("<think>hm</think>yes") as server:
        answer = await server.ok(PATH, {"messages": MESSAGES, "include_reasoning": False})
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}


async def test_many_conversations() -> None:
    async with answering() as server:
        answer = await server.ok(f"{PATH}/batch", {"messages": [MESSAGES, MESSAGES], "tools": TOOLS, "n": 2})
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [2] * 4


async def test_arguments_of_earlier_calls_reach_the_template_as_objects() -> None:
    history = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    async with answering() as server:
        await server.ok(PATH, {"messages": history, "tools": TOOLS, "max_tokens": 1})
        assert '{"name": "time", "arguments": {"a": 1}}' in prompt(server)
        tokens = await server.ok("/tokenize", {"messages": history, "tools": TOOLS})
        assert server.tokenizer.decode(tokens["tokens"], skip_special_tokens=False) == prompt(server)
        history[1]["tool_calls"][0]["function"]["arguments"] = "[1"
        error = await server.error(PATH, {"messages": history, "tools": TOOLS})
        assert error["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("stop", [[], ["Köln"], ["</tool_call>"]])
async def test_special_tokens_that_mark_calls_are_read_and_others_left_out(stop: list[str]) -> None:
    """And stop strings see the same text, whole and streamed."""
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.add_special_tokens(["<tool_call>", "</tool_call>", "<other>"])
    tokenizer = Tokenizer(backend, NAMES)
    text = f"<other>It<other> is so\n{CALL}<other>"
    async with answering(text, tokenizer=tokenizer) as server:
        body = {"messages": MESSAGES, "tools": TOOLS, "stop": stop}
        whole = (await server.ok(PATH, body))["choices"][0]["message"]
        events = await server.events(PATH, body)
        plain = await server.ok(PATH, {"messages": MESSAGES, "chat_template_kwargs": {"tools_are": "not shown"}})
    deltas = [event["choices"][0]["delta"] for event in events]
    called = [call["function"] for call in whole.get("tool_calls", [])]
    assert called == [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert bool(called) == (stop != ["Köln"])
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
    assert whole["content"].startswith("It is so")
    assert "<other>" not in whole["content"]
    assert plain["choices"][0]["message"]["content"].startswith("It is so")


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ("{{ messages }}", {}, "tools"),
        ("{{ messages }}{{ tools }}", {}, "tools"),
        ("{{ tools }}[func_name1(", {"tool_choice": "required", "tools": [DASHED]}, "tool_choice"),
        ("{{ tools }}[func_name1(", {"tools": [DASHED, STRICT]}, "tools[1].function.strict"),
        (TEMPLATE, {"tools": [LOOKING_STRICTLY]}, "tools[0].function.strict"),
        (TEMPLATE, {"tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        (TEMPLATE, {"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (TEMPLATE, {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function"),
        (TEMPLATE, {"tool_choice": {"type": "function"}}, "tool_choice.function"),
        (TEMPLATE, {"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        (TEMPLATE, {"reasoning_effort": "high"}, "reasoning_effort"),
        (TEMPLATE, {"thinking_token_budget": 3}, "thinking_token_budget"),  # </think> is several tokens
        ("{{ messages }}", {"thinking_token_budget": 3, "tools": []}, "thinking_token_budget"),
    ],
)
async def test_what_cannot_be_done_is_refused(template: str, fields: dict[str, Any], param: str) -> None:
    async with answering(template=template) as server:
        error = await server.error(PATH, {"messages": MESSAGES, "tools": TOOLS, **fields})
    assert error["param"] == param


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_the_function_whose_arguments_cannot_be_enforced_is_named(form: str, choice: str) -> None:
    """Whether the format or the library refuses them."""
    items = {"type": "array", "uniqueItems": True}
    others: list[dict[str, Any]] = [{"not": {}}, {}]
    for more in others:
        bad = {"name": "bad", "strict": True, "parameters": {"type": "object", "properties": {"a": items}, **more}}
        tools = [*TOOLS, STRICT, {"type": "function", "function": bad}]
        async with answering(tool_format=form) as server:
            error = await server.error(PATH, {"messages": MESSAGES, "tools": tools, "tool_choice": choice})
        assert error["param"] == ("tool_choice" if choice == "required" else "tools[2].function.strict")
        assert "the function 'bad': " in error["message"]


@pytest.mark.parametrize(
    ("choice", "has_time"), [("required", True), ({"type": "function", "function": {"name": "weather"}}, False)]
)
async def test_a_call_that_must_be_made_is_a_grammar(choice: Any, has_time: bool) -> None:
    """It lets the model think before it, as the prompt has begun to."""
    async with answering() as server:
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "chat_template_kwargs": {"thinks": True}}
        answer = await server.ok(PATH, body)
        await server.ok(PATH, {**body, "response_format": {"type": "json_object"}})  # of a text that there is none of
        grammar, other = (submit.sampling.grammar for submit in server.scheduler.submits)
    assert grammar == other
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert '"const": "weather"' in grammar
    assert ('"const": "time"' in grammar) == has_time
    assert grammar.startswith("start: toka_thought toka_output")


async def test_a_call_that_must_be_made_leaves_out_what_cannot_be_enforced() -> None:
    async with answering() as server:
        body = {"messages": MESSAGES, "tools": [{"type": "function", "function": LOOKING}], "tool_choice": "required"}
        await server.ok(PATH, body)
        (submit,) = server.scheduler.submits
    assert '"a": {"type": "string"}' in submit.sampling.grammar


async def test_a_strict_tool_makes_a_grammar_in_which_text_is_free() -> None:
    async with answering() as server:
        await server.ok(PATH, {"messages": MESSAGES, "tools": [*TOOLS, STRICT], "parallel_tool_calls": False})
        await server.ok(PATH, {"messages": MESSAGES, "tools": TOOLS, "response_format": {"type": "json_object"}})
        await server.ok(PATH, {"messages": MESSAGES, "tools": TOOLS})
        strict, content, free = (submit.sampling.grammar for submit in server.scheduler.submits)
    assert '"const": "f"' in strict
    assert "toka_text" in strict
    assert "toka_content_alone" in content
    assert '"const": "weather"' in content
    assert free == ""


def marked() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.add_special_tokens(["<think>", "</think>"])
    return Tokenizer(backend, NAMES)


@pytest.mark.parametrize(("budget", "is_bound"), [(7, True), (0, True), (-1, False), (None, False)])
async def test_a_budget_of_thinking_tokens_is_a_grammar(budget: int | None, is_bound: bool) -> None:
    async with answering(tokenizer=marked()) as server:
        kwargs = {"thinks": True}
        body = {"messages": MESSAGES, "thinking_token_budget": budget, "chat_template_kwargs": kwargs}
        await server.ok(PATH, body)
        await server.ok(f"{PATH}/batch", {**body, "messages": [MESSAGES, MESSAGES]})
        one, *many = (submit.sampling.grammar for submit in server.scheduler.submits)
    assert set(many) == {one}
    assert (("{0,7}" in one) if budget else ("toka_thought" in one)) == is_bound


async def test_the_effort_of_reasoning_reaches_templates_that_know_it() -> None:
    async with answering(template="{{ messages[0].content }} {{ reasoning_effort }}") as server:
        await server.ok(PATH, {"messages": MESSAGES, "reasoning_effort": "low", "max_tokens": 1})
        assert prompt(server) == "hi low"
        body = {"messages": MESSAGES, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}
        assert (await server.error(PATH, body))["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("template", "kwargs", "written"),
    [
        ("{{ messages[0].content }} {{ enable_thinking }}", {}, "hi False"),
        ("{{ messages[0].content }} {{ thinking }}", {}, "hi False"),
        ("{{ messages[0].content }} {{ enable_thinking }}", {"enable_thinking": True}, "hi True"),
        ("{{ messages[0].content }}", {}, "hi"),
    ],
)
async def test_no_effort_switches_thinking_off_where_the_template_can(
    template: str, kwargs: dict[str, Any], written: str
) -> None:
    async with answering(template=template) as server:
        body = {"messages": MESSAGES, "reasoning_effort": "none", "chat_template_kwargs": kwargs, "max_tokens": 1}
        await server.ok(PATH, body)
        assert prompt(server) == written


async def test_the_format_can_be_configured() -> None:
    async with answering("[weather(city='x')]", "{{ tools }}", tool_format="pythonic") as server:
        answer = await server.ok(PATH, {"messages": MESSAGES, "tools": TOOLS})
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":"x"}'
