from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

from tests.drivers.answering import ANSWER, CALL, OTHER, answering, prompt
from tests.drivers.web_server import NAME, WebServer, web_server

PATH = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "time", "parameters": None, "strict": None},
]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


async def ask(server: WebServer, **fields: Any) -> Response:
    return Response.model_validate(await server.ok(PATH, {"input": "hi", **fields}))


async def test_items_come_in_the_order_in_which_they_were_written() -> None:
    async with answering(f"{ANSWER}\nIt is\n{CALL}") as server:
        answer = await ask(server, tools=TOOLS, model=NAME)
        assert prompt(server).startswith('[{"type": "function", "function": {"name": "weather"')
    assert [item.type for item in answer.output] == [
        *("reasoning", "message", "function_call", "function_call", "message", "function_call"),
    ]
    reasoning, message, first, *_ = answer.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == ["Let me see."]
    assert reasoning.summary == []
    assert message.type == "message"
    assert (message.status, [part.type for part in message.content]) == ("completed", ["output_text"])
    assert answer.output_text.split() == ["I", "look.", "It", "is"]
    assert first.type == "function_call"
    assert (first.name, first.arguments, first.status) == ("weather", '{"city":"Köln"}', "completed")
    assert first.call_id.startswith("call_")
    assert len({item.id for item in answer.output}) == 6
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.completed_at is not None


async def test_it_repeats_what_was_asked_for() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": False}
    async with answering("{}") as server:
        answer = await ask(
            server,
            instructions="be brief",
            metadata={"a": "b"},
            text={"format": schema},
            temperature=0.25,
            tool_choice="none",
            tools=TOOLS,
            reasoning={"effort": "none"},
            max_output_tokens=9,
            request_id="mine",
            user="u",
        )
    assert (answer.id, answer.model, answer.instructions, answer.metadata) == (
        "resp_mine",
        NAME,
        "be brief",
        {"a": "b"},
    )
    assert answer.text is not None
    assert answer.text.to_dict()["format"] == schema | {"description": None}
    assert (answer.temperature, answer.top_p, answer.tool_choice, answer.max_output_tokens) == (0.25, 1.0, "none", 9)
    assert [tool.type for tool in answer.tools] == ["function", "function"]
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "none"
    assert (answer.parallel_tool_calls, answer.truncation, answer.user) == (True, "disabled", "u")
    assert (answer.background, answer.previous_response_id) == (False, None)


async def test_usage() -> None:
    async with answering("<think>Let me see.</think>yes") as server:
        answer = await ask(server)
        again = await ask(server)
        num_thought = len(server.tokenizer.encode("Let me see.", False))
    for usage in (answer.usage, again.usage):
        assert usage is not None
        assert usage.output_tokens_details.reasoning_tokens == num_thought
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        details = usage.input_tokens_details
        assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens


async def test_a_summary_is_the_reasoning_where_one_is_asked_for() -> None:
    async with answering("<think>hm</think>yes") as server:
        answer = await ask(server, reasoning={"summary": "auto"})
    reasoning, _ = answer.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.summary] == ["hm"]
    assert not reasoning.content


async def test_what_is_cut_off_is_incomplete() -> None:
    async with answering("<think>It is long</think>yes") as server:
        texts = ("<think>It is", "<think>It is long</think>y")
        thinking, saying = [
            await ask(server, max_output_tokens=len(server.tokenizer.encode(text, False))) for text in texts
        ]
    for answer, kind in ((thinking, "reasoning"), (saying, "message")):
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        last = answer.output[-1]
        assert (last.type, getattr(last, "status", None)) == (kind, "incomplete")
    assert saying.output[0].type == "reasoning"
    assert saying.output[0].status == "completed"


async def test_a_call_after_which_an_answer_is_cut_off_is_incomplete() -> None:
    """Those before it are not."""
    async with answering(f"{CALL}{OTHER}{CALL}") as server:
        limit = len(server.tokenizer.encode(f"{CALL}{OTHER}", False))
        cut, whole = [await ask(server, tools=TOOLS, max_output_tokens=each) for each in (limit, 300)]
    assert [getattr(item, "status", None) for item in cut.output] == ["completed", "incomplete"]
    assert [item.type for item in cut.output] == ["function_call"] * 2
    assert [getattr(item, "status", None) for item in whole.output] == ["completed"] * 3


async def test_an_empty_answer_is_a_message() -> None:
    async with answering("") as server:
        answer = await ask(server)
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text == ""


@pytest.mark.parametrize("text", [f"<think>hm</think>\n Köln is so \n{CALL}\nand so{OTHER}", "plain"])
async def test_logprobs_are_of_the_tokens_of_the_text(text: str) -> None:
    async with answering(text) as server:
        answer = await ask(server, tools=TOOLS, **LOGPROBS)
    assert answer.top_logprobs == 2
    messages = [item for item in answer.output if item.type == "message"]
    assert messages
    for message in messages:
        (part,) = message.content
        assert part.type == "output_text"
        assert part.logprobs
        spelled = bytes(byte for each in part.logprobs for byte in each.bytes).decode()
        assert spelled.strip() == part.text.strip()
        assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


async def test_turns_that_do_not_fit_are_dropped_where_that_is_wanted() -> None:
    turns = [{"role": role, "content": f"{number}{'x' * 60}"} for number in range(8) for role in ("user", "assistant")]
    body = {"input": [*turns, {"role": "user", "content": "last"}], "instructions": "first", "max_output_tokens": 20}
    async with web_server() as server:
        refused = await server.error(PATH, body)
        assert (refused["param"], refused["code"]) == ("input", "context_length_exceeded")
        await ask(server, truncation="auto", **body)
        kept = prompt(server)
        assert kept.startswith("<system>first\n<user>")
        assert kept.endswith("<user>last\n<assistant>")
        assert 0 < kept.count("<assistant>") - 1 < 8
        alone = {"input": "x" * 600, "truncation": "auto"}
        assert (await server.error(PATH, alone))["code"] == "context_length_exceeded"
        assert (await server.error(PATH, {**body, "truncation": "auto", "model": "other"}, 404))["param"] == "model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 3}}}}, "text.format"),
        ({"top_k": -5}, "top_k"),
        ({"input": [{"type": "message"}]}, "input[0]"),
    ],
)
async def test_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    async with answering() as server:
        assert (await server.error(PATH, {"input": "hi", **fields}))["param"] == param
