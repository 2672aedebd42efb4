from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser as Oracle

from tests.cases.tool_calls import FORMATS, PROMPTS, Answer, answers, draw_cuts, make_format, parse, write_answer
from toka_async.text.formats.choice import ResponseFormat, choose_format
from toka_async.text.formats.parser import Call, Parsed

TOOLS = {"f": {"a": {"type": "integer"}, "s": {"type": "string"}}, "g": {}}
MADE = {name: make_format(name) for name in FORMATS}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def fits(name: str, answer: Answer) -> bool:
    """Whether models of the format can write the answer."""
    if name in ("llama3_json", "pythonic") and answer.calls and answer.content:
        return False
    values = [value for _, arguments in answer.calls for value in arguments.values()]
    if name == "qwen3_coder":  # plain text has no types of its own, and no way to quote its own tags
        if len({called for called, _ in answer.calls}) < len(answer.calls):
            return False
        return not any("</parameter>" in value for value in values if isinstance(value, str))
    return True


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(answer=answers(), seed=st.integers(0, 99))
def test_streamed_is_whole_is_what_was_written(name: str, answer: Answer, seed: int) -> None:
    if not fits(name, answer):
        answer = Answer(answer.reasoning, "", answer.calls if name != "qwen3_coder" else ())
    text, format, prompt = write_answer(name, answer), MADE[name], PROMPTS.get(name, "")
    whole = parse(format, text, answer.tools, prompt=prompt)
    assert parse(format, text, answer.tools, draw_cuts(Random(seed), len(text)), prompt) == whole
    assert (whole.reasoning, whole.content) == (answer.reasoning, answer.content)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == list(answer.calls)


BROKEN = st.lists(
    st.sampled_from(
        [
            *(
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                CALL,
                "{",
                '"',
                "}",
                "[",
                "]",
                "\\",
                "\n",
                " ",
                "x",
            ),
            *(
                "<function=f>",
                "<parameter=a>",
                "5",
                "</parameter>",
                "</function>",
                "[TOOL_CALLS]",
                "f[ARGS]{}",
                "[THINK]",
            ),
            *("<|python_tag|>", '{"name": "g", "parameters": {}}', "; ", "[g()]", "[/THINK]", "<tool", "<|chan"),
            *(
                "<|channel|>analysis<|message|>",
                "<|channel|>commentary to=functions.g<|message|>{}",
                "<|call|>",
                "<|end|>",
            ),
            *("<|start|>assistant", " to=functions.g<|channel|>commentary<|message|>{}", "<|channel|>final<|message|>"),
        ]
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(text=BROKEN, seed=st.integers(0, 99), tools=st.sampled_from([TOOLS, {}]))
def test_whatever_a_model_writes_streamed_is_whole(name: str, text: str, seed: int, tools: dict[str, Any]) -> None:
    format, random = MADE[name], Random(seed)
    whole = parse(format, text, tools)
    for _ in range(3):
        assert parse(format, text, tools, draw_cuts(random, len(text))) == whole


QWEN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}
QWEN35 = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        **QWEN["fields"],  # type: ignore[dict-item]
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
COHERE = {
    "start_anchor": "<|CHATBOT_TOKEN|>",
    "fields": {
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
GEMMA = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
PARAMETERS = "<parameter=a>\n5\n</parameter>\n<parameter=s>\n7 a\n</parameter>\n"
XML = f"<tool_call>\n<function=f>\n{PARAMETERS}</function>\n</tool_call>"
TEXTS = [
    (QWEN, ["<think>\nhm\n</think>", "\n\nhello", f"\n{CALL}", f"\n{CALL}", "<|im_end|>\n<|endoftext|>"]),
    (QWEN35, ["<think>\nhm\n</think>", "\n\nhello", f"\n{XML}", f"\n{XML}", "<|im_end|>"]),
    (
        COHERE,
        [
            "<|START_THINKING|>I think<|END_THINKING|>",
            "<|START_RESPONSE|>hello <b><|END_RESPONSE|>",
            '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}, {"tool_name": "g", "parameters": {}}]'
            "<|END_ACTION|>",
        ],
    ),
    (
        GEMMA,
        [
            "<|channel>thought\nhm<channel|>",
            '<|tool_call>call:f{a:5,s:<|"|>x "y"<|"|>}<tool_call|>',
            " hello ",
            "<turn|>",
        ],
    ),
]


@pytest.mark.parametrize(("template", "parts"), TEXTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_parser_of_transformers_says_the_same(
    template: dict[str, Any], parts: list[str], data: st.DataObject
) -> None:
    """Of texts whose content is in one piece: transformers keeps the last one."""
    chosen = data.draw(st.lists(st.sampled_from(range(len(parts))), unique=True).map(sorted))
    text = "".join(parts[index] for index in chosen)
    format = choose_format("", "auto", "auto", template)
    assert format is not None
    tools: list[Any] = [
        {"type": "function", "function": {"name": n, "parameters": {"properties": p}}} for n, p in TOOLS.items()
    ]
    prefix = template["start_anchor"] if isinstance(template["start_anchor"], str) else template["start_anchor"][0]
    oracle = Oracle(template, prefix=f"user {prefix}", tools=tools)
    oracle.feed(text)
    told, _ = oracle.finalize()
    parsed = parse(format, text, TOOLS, draw_cuts(Random(data.draw(st.integers(0, 99))), len(text)), f"user {prefix}")
    assert parsed.reasoning == told.get("reasoning_content", told.get("thinking", ""))
    assert parsed.content == told.get("content", "")
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in told.get("tool_calls", ())]
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


@pytest.mark.parametrize(("name", "template"), [("hermes", QWEN), ("qwen3_coder", QWEN35)])
@settings(max_examples=15, deadline=None)
@given(answer=answers(), seed=st.integers(0, 99))
def test_what_models_write_is_read_as_by_transformers(
    name: str, template: dict[str, Any], answer: Answer, seed: int
) -> None:
    """By the built-in formats, in any portions of both."""
    if name == "qwen3_coder":  # its values are texts to transformers, whose template strips them
        answer = Answer(
            answer.reasoning, answer.content, [(called, {"a": place}) for place, (called, _) in enumerate(answer.calls)]
        )
    if "</tool_call>" in str(answer.calls):  # transformers ends the call there
        answer = Answer(answer.reasoning, answer.content)
    text, random, prefix = write_answer(name, answer), Random(seed), "user <|im_start|>assistant\n"
    properties = {"a": {"type": "integer"}}
    tools: list[Any] = [
        {"type": "function", "function": {"name": each, "parameters": {"type": "object", "properties": properties}}}
        for each in answer.tools
    ]
    oracle = Oracle(template, prefix=prefix, tools=tools)
    for start, end in pairwise([0, *sorted(draw_cuts(random, len(text))), len(text)]):
        oracle.feed(text[start:end])
    told, _ = oracle.finalize()
    parsed = parse(MADE[name], text, answer.tools, draw_cuts(random, len(text)), prefix)
    assert (parsed.reasoning, parsed.content) == (told.get("reasoning_content", ""), told.get("content", ""))
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in told.get("tool_calls", ())]
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "zz", "arguments": {}}</tool_call>', "all"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "all"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "all"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\\ud800"}}</tool_call>', "all"),
        ("hermes", '<tool_call>{"name": "f", "argume', "all"),
        ("hermes", "say <think> aloud", "all"),
        ("llama3_json", '{"name": "f", "parameters": {}, "more": 1}', "all"),
        ("llama3_json", '{"name": "zz", "parameters": {}}', "all"),
        ("llama3_json", 'it is {"name": "f", "parameters": {}}', "all"),
        ("llama3_json", "{" * 100_000, "all"),
        ("pythonic", "[f(1)]", "all"),
        ("pythonic", "[f(s='from=1', from=2)]", ""),
        ("pythonic", "[f(a=b)]", "all"),
        ("pythonic", "[1, 2]", "all"),
        ("pythonic", "[f(a=1e999)]", "all"),
        ("pythonic", "[" * 10_000, "all"),
        ("mistral", "[TOOL_CALLS]nothing", "all"),
        ("hermes", f"{CALL} and more", "and more"),
        ("hermes", f"before\n{CALL}\nafter", "before\n\nafter"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str, expected: str) -> None:
    assert parse(MADE[name], text, TOOLS).content == (text if expected == "all" else expected)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=10, deadline=None)
@given(answer=answers().filter(lambda each: bool(each.calls)), data=st.data())
def test_calls_of_an_answer_that_is_cut_off_are_whole_ones(name: str, answer: Answer, data: st.DataObject) -> None:
    if not fits(name, answer):
        calls = [("f", {"a": 1, "b": "c"})] if name == "qwen3_coder" else answer.calls
        answer = Answer(answer.reasoning, "", calls)
    text, prompt = write_answer(name, answer), PROMPTS.get(name, "")
    text = text[: data.draw(st.integers(len(text) // 2, len(text)))]
    whole = parse(MADE[name], text, answer.tools, prompt=prompt, is_cut=True)
    made = [(call.name, json.loads(call.arguments)) for call in whole.calls]
    assert made == list(answer.calls[: len(made)])
    cuts = draw_cuts(Random(data.draw(st.integers(0, 99))), len(text))
    assert parse(MADE[name], text, answer.tools, cuts, prompt, is_cut=True) == whole


ONE = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (f"{ONE}</function>\n</tool_call>", {"a": 5}),
        (f"{ONE}</function>\n", {"a": 5}),
        (f"{ONE}</func", {"a": 5}),
        (ONE, {"a": 5}),
        ("<tool_call>\n<function=f>\n</function>", {}),
        (ONE.removesuffix("</parameter>\n"), None),
        (f"{ONE}<parameter=s>\n", None),
        (f"{ONE}<param", None),
        (f"{ONE}</function>\nso", None),
    ],
)
def test_tags_at_the_end_may_be_missing_where_the_model_ended_its_answer(
    text: str, arguments: dict[str, Any] | None
) -> None:
    """And what is there is whole; an answer that was cut off has no such call."""
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"properties": TOOLS["f"]}}}]
    calls = [] if arguments is None else [("f", arguments)]
    for made in (MADE["qwen3_coder"], choose_format("", "auto", "auto", QWEN35)):
        assert made is not None
        for is_cut in (False, True):
            expected = [] if is_cut and not text.endswith("</tool_call>") else calls
            parsed = parse(made, text, TOOLS, [len(text) // 2], is_cut=is_cut)
            assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == expected
            assert parsed.content == ("" if expected else text.rstrip())
    oracle = Oracle(QWEN35, prefix="<|im_start|>assistant\n", tools=tools)
    oracle.feed(text)
    told, _ = oracle.finalize()
    if arguments is not None:  # transformers also takes calls that are not whole
        assert told["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}


def test_calls_without_tools_are_content() -> None:
    assert parse(MADE["hermes"], CALL, {}) == Parsed(content=CALL)


def test_a_call_is_given_when_it_closes_and_content_as_it_comes() -> None:
    parser = MADE["hermes"].start(TOOLS, None, True, "")
    assert parser.push("It is ") == Parsed(content="It is")
    assert parser.push("so <") == Parsed(content=" so")
    assert parser.push("b") == Parsed(content=" <b")
    assert not parser.push(CALL[:-1])
    assert parser.push(CALL[-1]) == Parsed(calls=[Call("f", '{"a":1}')])


@pytest.mark.parametrize("seed", range(10))
def test_parts_are_in_the_order_in_which_they_were_written(seed: int) -> None:
    text = f"<think>hm</think>\nIt is {CALL}{CALL} so {CALL[:-1]}"
    parser, runs = MADE["hermes"].start(TOOLS, None, True, ""), list[Any]()
    places = [0, *sorted(draw_cuts(Random(seed), len(text))), len(text)]
    for start, end in pairwise(places):
        for part in parser.push(text[start:end], is_end=end == len(text)).parts:
            last = runs[-1] if runs else None
            if isinstance(part, tuple) and isinstance(last, tuple) and part[0] == last[0]:
                runs[-1] = (part[0], last[1] + part[1])
            else:
                runs.append(part)
    call = Call("f", '{"a":1}')
    assert runs == [("reasoning", "hm"), ("content", "It is"), call, call, ("content", f"  so {CALL[:-1]}")]


@pytest.mark.parametrize(
    ("prompt", "reasoning", "content"),
    [
        ("<|im_start|>assistant\n<think>\n", "so", ""),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "so"),
        ("<|im_start|>assistant\n", "", "so"),
        ("a template of another kind: <think>\n", "so", ""),
        ("the user says <think>, assistant: ", "", "so"),
        ("<|im_start|>assistant\n<think> it was", "so", ""),
    ],
)
def test_the_prompt_may_have_opened_the_reasoning(prompt: str, reasoning: str, content: str) -> None:
    """And what is cut off stays what it was."""
    assert parse(MADE["hermes"], "so\n", TOOLS, prompt=prompt) == Parsed(reasoning, content)


def test_reasoning_may_be_unwanted() -> None:
    parser = MADE["hermes"].start(TOOLS, None, False, "")
    assert parser.push("<think>hm</think>yes", is_end=True) == Parsed(content="yes")


def test_calls_beyond_the_most_are_dropped() -> None:
    parsed = parse(MADE["mistral"], '[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]{"a": 2}', TOOLS, most_calls=1)
    assert parsed == Parsed(calls=[Call("g", "{}")])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "1.50", 1.5),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "string"}, "  two\n  lines\n", "  two\n  lines\n"),
        ({}, "5", "5"),
    ],
)
def test_arguments_of_plain_text_have_their_schemas_types(schema: dict[str, Any], text: str, value: Any) -> None:
    written = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse(MADE["qwen3_coder"], written, {"f": {"x": schema}}).calls
    assert json.loads(call.arguments) == {"x": value}


def test_blanks_without_end_take_linear_time() -> None:
    """Of each piece, only what it adds is looked at again and again; counted in pieces, not in seconds."""
    parser = MADE["qwen3_coder"].start(TOOLS, None, True, "")
    for _ in range(2_000):
        assert not parser.push("\n ")
    assert parser.push("x", is_end=True) == Parsed(content="x")


def test_the_format_of_gpt_oss_has_recipients_in_two_places() -> None:
    format: ResponseFormat = MADE["harmony"]
    for header in (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        " to=functions.f<|channel|>analysis<|message|>",
    ):
        text = f'<|channel|>analysis<|message|>hm<|end|><|start|>assistant{header}{{"a": 1}}'
        assert parse(format, text, TOOLS, prompt="<|start|>assistant") == Parsed("hm", "", [Call("f", '{"a":1}')])
