"""Answers with reasoning, text and tool calls, written as models of each format write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import strategies as st

from toka_async.text.formats.choice import ResponseFormat, choose_format
from toka_async.text.formats.parser import Parsed

FORMATS = ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "mistral_named", "harmony")
THINKING = {"harmony": "harmony", "mistral": "mistral", "mistral_named": "mistral"}
PROMPTS = {"harmony": "<|start|>assistant"}
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """calls: names and arguments."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[tuple[str, Arguments]] = field(default_factory=tuple)

    @property
    def tools(self) -> dict[str, Any]:
        """What a request that offers the tools says of their parameters, by name."""
        found: dict[str, Any] = {name: {} for name, _ in self.calls}
        for name, arguments in self.calls:
            for key, value in arguments.items():
                found[name].setdefault(key, {"anyOf": []})["anyOf"].append({"type": type_of(value)})
        return found


def make_format(name: str) -> ResponseFormat:
    thinking = THINKING.get(name, "think")
    made = choose_format("", "mistral" if name == "mistral_named" else name, thinking)
    assert made is not None
    return made


def write_answer(name: str, answer: Answer) -> str:
    """What a model of the format writes."""
    if name == "harmony":
        return write_harmony(answer)
    opening, closing = ("[THINK]", "[/THINK]") if name.startswith("mistral") else ("<think>\n", "\n</think>\n\n")
    thought = f"{opening}{answer.reasoning}{closing}" if answer.reasoning else ""
    return thought + answer.content + write_calls(name, answer.calls)


def write_calls(name: str, calls: Sequence[tuple[str, Arguments]]) -> str:
    entries = [{"name": called, "arguments": arguments} for called, arguments in calls]
    match name:
        case "hermes":
            return "".join(f"\n<tool_call>\n{dump(each)}\n</tool_call>" for each in entries)
        case "qwen3_coder":
            return "".join(write_xml(*each) for each in calls)
        case "llama3_json":
            return "; ".join(dump({"name": called, "parameters": arguments}) for called, arguments in calls)
        case "pythonic":
            return f"[{', '.join(write_python(*each) for each in calls)}]" if calls else ""
        case "mistral":
            return f"[TOOL_CALLS]{dump(entries)}" if entries else ""
    return "".join(f"[TOOL_CALLS]{called}[ARGS]{dump(arguments)}" for called, arguments in calls)


def write_xml(name: str, arguments: Arguments) -> str:
    values = [(key, value if isinstance(value, str) else dump(value)) for key, value in arguments.items()]
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def write_python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def write_harmony(answer: Answer) -> str:
    header, parts = "<|start|>assistant", []
    if answer.reasoning:
        parts.append(f"<|channel|>analysis<|message|>{answer.reasoning}<|end|>")
    if answer.content:
        channel = "commentary" if answer.calls else "final"
        parts.append(f"<|channel|>{channel}<|message|>{answer.content}<|end|>")
    for name, arguments in answer.calls:
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        parts.append(f"{head}{dump(arguments)}<|call|>")
    return header.join(parts).removesuffix("<|call|>")  # the model's end token, which is no text


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def type_of(value: Any) -> str:
    kinds: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object" if isinstance(value, dict) else "null")


def parse(
    format: ResponseFormat,
    text: str,
    tools: Mapping[str, Any],
    cuts: Sequence[int] = (),
    prompt: str = "",
    most_calls: int | None = None,
    is_cut: bool = False,
) -> Parsed:
    """What the parser makes of a text that comes in pieces."""
    parser = format.start(tools, most_calls, True, format.template.cut_prompt(prompt))
    places = [0, *sorted(cuts), len(text)]
    whole = Parsed()
    for start, end in pairwise(places):
        add(whole, parser.push(text[start:end]))
    return add(whole, parser.push("", is_end=True, is_cut=is_cut))


def add(whole: Parsed, part: Parsed) -> Parsed:
    whole.reasoning += part.reasoning
    whole.content += part.content
    whole.calls += part.calls
    return whole


def draw_cuts(random: Random, size: int) -> list[int]:
    return [random.randrange(size + 1) for _ in range(random.choice((1, 3, size // 4, size)))]


NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
WORDS = st.text(st.characters(exclude_categories=["C"]), max_size=12) | st.sampled_from(
    ["</tool_call>", 'a "b" \\ c', "[TOOL_CALLS", "{", "<|call", "}\n", "你好", "<function=x>", "\\n", "f(x)]", "'"]
)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False, width=32)
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = st.recursive(
    SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3), max_leaves=6
)
PLAIN = st.from_regex(r"[A-Za-z0-9,.?! <\n]{0,30}[a-z.]", fullmatch=True).map(str.strip)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    calls = draw(st.lists(st.tuples(NAMES, st.dictionaries(NAMES.map("p_{}".format), VALUES, max_size=4)), max_size=3))
    return Answer(draw(st.just("") | PLAIN), draw(st.just("") | PLAIN), calls)
