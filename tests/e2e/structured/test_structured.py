"""Structured output and tool calls through whole servers: every route's fields, and models in parallel."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.cases.grammars import ORDER, TIGHT
from tests.cases.marked_model import FIRST_MARK, TEMPLATE, write_marked_model
from tests.drivers.until import wait_until
from tests.processes.serving import Serving, free_port, serving
from toka_async.client import RequestError, SyncClient

SCHEMA = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER, "strict": True}}
PROMPTS = [f"Question: Mia buys {number} pens.\nAnswer:" for number in range(25)]


URL = f"tcp://127.0.0.1:{free_port()}"


def marked(folder: Path) -> list[str]:
    return [f"model.path={write_marked_model(folder, TEMPLATE)}", "model.served_name=demo"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("structured")
    with serving(folder, f"zmq.bind={URL}", *marked(folder)) as running:
        yield running


def ask(server: Serving, path: str, body: dict[str, Any]) -> Any:
    status, answer = server.post(path, **body)
    assert status == 200, answer
    return answer


def complete(server: Serving, **fields: Any) -> list[str]:
    """Texts of samples that ended by themselves."""
    choices = ask(server, "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 200, "seed": 1} | fields)["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["text"] for choice in choices]


def check_orders(texts: list[str]) -> None:
    for text in texts:
        jsonschema.validate(json.loads(text), ORDER)


def test_a_grammar_without_measure_is_refused_and_others_do_not_wait(server: Serving) -> None:
    """Compiling it in a rank would take all of the machine's memory, and nobody could stop it."""
    patterns = [{"pattern": f"(a|b)*a(a|b){{{length}}}"} for length in range(8, 30)]
    fields = {"prompt": "x", "structured_outputs": {"json": {"type": "string", "allOf": patterns}}}
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(server.post, "/v1/completions", **fields)
        while not asked.done():
            began = time.monotonic()
            ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert time.monotonic() - began < 3
    status, answer = asked.result()
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")
    assert "more than 1 s of a processor" in answer["error"]["message"]


@pytest.mark.parametrize("num_prompts", [5, pytest.param(125, marks=pytest.mark.slow)])
def test_samples_by_schema_are_valid(server: Serving, num_prompts: int) -> None:
    prompts = [f"{prompt} {number}" for number in range(num_prompts // 5) for prompt in PROMPTS[:5]]
    texts = complete(server, prompt=prompts, n=8, temperature=1.0, response_format=SCHEMA)
    assert len(texts) == 8 * num_prompts
    check_orders(texts)
    assert len(set(texts)) > num_prompts


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{1,3}"}, "[a-c]{3}-[0-9]{1,3}"),
        ({"guided_regex": "x{2,4}"}, "x{2,4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": {"const": 5}}, "5"),
        ({"guided_grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
        ({"ebnf": 'root ::= "b" | "c"'}, "b|c"),
        ({"json_schema": '{"enum": ["x"]}'}, '"x"'),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"structured_outputs": {"regex": "a|b"}}, "a|b"),
        ({"structured_outputs": {"grammar": 'start: "q"'}}, "q"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "const_string", "value": "z"}}}}, "z"),
        ({"structural_tag": '{"format": {"type": "regex", "pattern": "[ab]"}}'}, "a|b"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "k"}}}, "k"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}}, "1"),
    ],
)
def test_every_field_shapes_the_output(server: Serving, fields: dict[str, Any], pattern: str) -> None:
    for text in complete(server, n=2, **fields):
        assert re.fullmatch(pattern, text)


def test_samples_do_not_depend_on_streams_and_stop_strings_cut_them(server: Serving) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "What is 3 + 4?"}]
    fields: Any = {"model": "demo", "messages": messages, "n": 2, "seed": 3, "response_format": SCHEMA}
    whole = client.chat.completions.create(**fields)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    check_orders(texts)
    cut = client.chat.completions.create(**fields, stop=['"state"'])
    assert [choice.message.content for choice in cut.choices] == [
        text.partition('"state"')[0].rstrip() for text in texts
    ]


TAG = {"type": "tag", "begin": "(", "content": {"type": "json_schema", "json_schema": {"const": 5}}, "end": ")"}


def test_other_routes(server: Serving) -> None:
    params = {"regex": "[ab]{3}", "max_new_tokens": 9}
    assert re.fullmatch("[ab]{3}", ask(server, "/generate", {"text": "x", "sampling_params": params})["text"])
    tag: dict[str, Any] = {"format": {"type": "triggered_tags", "triggers": ["("], "tags": [TAG], "at_least_one": True}}
    tag["format"]["stop_after_first"] = True
    params = {"structural_tag": json.dumps(tag), "max_new_tokens": 9}
    assert ask(server, "/generate", {"text": "x", "sampling_params": params})["text"] == "(5)"
    tokens = {"token_ids": [5], "sampling_params": {"structured_outputs": {"choice": ["a"]}}, "output_mode": "text"}
    assert ask(server, "/inference/v1/generate", tokens)["choices"][0]["text"] == "a"

    fields: Any = {"structured_outputs": {"choice": ["no"]}, "max_tokens": 9, "seed": 1}  # draws one of the end tokens
    with SyncClient(URL) as client:
        with_text, ids_alone = (client.generate("x", text=text, **fields).samples[0] for text in (True, False))
    assert with_text.text == "no"
    assert with_text.token_ids.tolist() == ids_alone.token_ids.tolist()


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"regex": "a("}, "regex", "unclosed group"),
        ({"ebnf": "root ::= ((("}, "ebnf", "neither"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"structural_tag": {"format": {"type": "dispatch"}}}, "structural_tag", "dispatch"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    server: Serving, fields: dict[str, Any], param: str, word: str
) -> None:
    for stream in (True, False):  # the engine may have the first one before it is found out
        status, answer = server.post("/v1/completions", prompt="x", n=4, max_tokens=1000, stream=stream, **fields)
        error = answer["error"]
        assert (status, error["param"]) == (400, param)
        assert word in error["message"]
    wait_until(lambda: server.metric("num_requests_running") == 0)


def test_a_grammar_that_cannot_be_enforced_is_refused_on_other_routes(server: Serving) -> None:
    parts = [{"regex": "a", "max_new_tokens": 1000}, {"regex": "(a{3}", "max_new_tokens": 1000}]
    status, answer = server.post("/generate", text=["x", "y"], sampling_params=parts)
    assert (status, answer["error"]["param"]) == (400, "sampling_params[1].regex")
    with SyncClient(URL) as client:
        for text in (True, False):
            with pytest.raises(RequestError, match="regex"):
                client.generate("x", text=text, max_tokens=9, structured_outputs={"regex": "(b{3}"})
    wait_until(lambda: server.metric("num_requests_running") == 0)


def test_a_refused_response_names_its_own_field(server: Serving) -> None:
    schema = {"type": "array", "uniqueItems": True}
    text = {"format": {"type": "json_schema", "name": "order", "schema": schema, "strict": True}}
    for _ in range(2):
        status, answer = server.post("/v1/responses", model="demo", input="x", text=text)
        assert (status, answer["error"]["param"]) == (400, "text.format")
        assert "uniqueItems" in answer["error"]["message"]


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
}
CITY |= {"required": ["city", "days"], "additionalProperties": False, "x-guidance": TIGHT}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False, "x-guidance": TIGHT}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": NOTHING}},
]
MESSAGES: Any = [{"role": "user", "content": "What is 3 + 4?"}]
OPEN_CALL, THINK, THOUGHT = FIRST_MARK, FIRST_MARK + 2, {"chat_template_kwargs": {"enable_thinking": True}}


def chat(server: Serving, **fields: Any) -> list[dict[str, Any]]:
    """The choices of an answer, whose streamed one is the same."""
    body = {"messages": MESSAGES, "seed": 5, "max_tokens": 300, "n": 3, **fields}
    choices: list[dict[str, Any]] = ask(server, "/v1/chat/completions", body)["choices"]
    streamed: list[dict[str, Any]] = [{"content": "", "reasoning": "", "calls": []} for _ in choices]
    for event in server.stream("/v1/chat/completions", **body):
        for choice in event["choices"]:
            delta, into = choice["delta"], streamed[choice["index"]]
            into["content"] += delta.get("content") or ""
            into["reasoning"] += delta.get("reasoning") or ""
            into["calls"] += [call["function"] for call in delta.get("tool_calls", ())]
    for choice, other in zip(choices, streamed, strict=True):
        message = choice["message"]
        assert (message["content"] or "", message.get("reasoning", "")) == (other["content"], other["reasoning"])
        assert [call["function"] for call in message.get("tool_calls", ())] == other["calls"]
    return choices


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required"}, {"weather", "time"}),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"weather"}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "time"}}],
                    },
                }
            },
            {"time"},
        ),
        # The bias lets the model begin a call where it may choose.
        ({"logit_bias": {str(OPEN_CALL): 100}}, {"weather", "time"}),
    ],
)
def test_calls_follow_their_schemas(server: Serving, fields: dict[str, Any], names: set[str]) -> None:
    for choice in chat(server, tools=TOOLS, parallel_tool_calls=False, **fields):
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in names
        schema = CITY if call["function"]["name"] == "weather" else NOTHING
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_where_the_model_may_choose_it_need_not_call(server: Serving) -> None:
    for choice in chat(server, tools=TOOLS, max_tokens=20):
        assert choice["message"]["content"]


def test_thoughts_end_at_their_budget(server: Serving) -> None:
    """With a grammar for what follows, and without; where tokens run out before, it stays a thought."""
    for more in ({}, {"response_format": SCHEMA}):
        for choice in chat(server, thinking_token_budget=6, return_token_ids=True, **THOUGHT, **more):
            assert choice["token_ids"].index(THINK + 1) <= 6
            assert choice["message"]["reasoning"]
            if more:
                check_orders([choice["message"]["content"]])
    for choice in chat(server, thinking_token_budget=6, max_tokens=4, logit_bias={str(THINK + 1): -100}, **THOUGHT):
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")


def test_thoughts_end_at_their_budget_outside_of_chats(server: Serving) -> None:
    """Completions, vLLM's and SGLang's routes, and direct submission; a prompt has begun the thought."""
    prompt = "Q: 3 + 4? <think>"
    budget: Any = {"thinking_token_budget": 6}
    fields: Any = {"max_tokens": 30, "seed": 3}
    whole = ask(server, "/v1/completions", {"prompt": prompt, "return_token_ids": True, **fields, **budget})
    (choice,) = whole["choices"]
    found = [choice["token_ids"]]
    sampling = {"custom_params": {"thinking_budget": 6}, "max_new_tokens": 30, "sampling_seed": 3}
    found += [ask(server, "/generate", {"text": prompt, "sampling_params": sampling})["output_ids"]]
    tokens = {"token_ids": choice["prompt_token_ids"], "sampling_params": fields | budget}
    found += [ask(server, "/inference/v1/generate", tokens)["choices"][0]["token_ids"]]
    with SyncClient(URL) as client:
        found += [client.generate(prompt, text=False, **fields, **budget).samples[0].token_ids.tolist()]
    for ids in found:
        assert ids.index(THINK + 1) <= 6


FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_a_loop_of_responses(server: Serving) -> None:
    """OpenAI's client: a thought and a call by schema, its output, and an answer by schema; whole and streamed."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    fields: dict[str, Any] = {"model": "demo", "max_output_tokens": 400, "parallel_tool_calls": False}
    fields["extra_body"] = {"seed": 5, "thinking_token_budget": 6, **THOUGHT}
    asked: Any = [{"role": "user", "content": "What is 3 + 4?"}]
    first = client.responses.create(**fields, input=asked, tools=FUNCTIONS, tool_choice="required")
    thought, call = first.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    assert first.usage is not None
    assert 0 < first.usage.output_tokens_details.reasoning_tokens <= 6
    jsonschema.validate(json.loads(call.arguments), CITY if call.name == "weather" else NOTHING)
    with client.responses.stream(**fields, input=asked, tools=FUNCTIONS, tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert [(item.type, getattr(item, "arguments", "")) for item in streamed.output] == [
        ("reasoning", ""),
        ("function_call", call.arguments),
    ]

    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    text: Any = {"format": {"type": "json_schema", "name": "order", "schema": ORDER, "strict": True}}
    answer = client.responses.create(**fields, input=[*asked, *first.output, output], text=text)
    check_orders([answer.output_text])
    assert answer.status == "completed"


def test_metrics_count_it(server: Serving) -> None:
    complete(server, regex="a{9}")
    assert server.metric("grammar_tokens_total") > 0


@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.pp=2"])
def test_models_in_parallel_draw_the_same(server: Serving, tmp_path: Path, layout: str) -> None:
    body = {"prompt": PROMPTS[:4], "n": 3, "temperature": 0.7, "response_format": SCHEMA}
    alone = complete(server, **body)
    check_orders(alone)
    thought = {"thinking_token_budget": 3, "max_tokens": 30, **THOUGHT}
    with serving(tmp_path, layout, *marked(tmp_path)) as parallel:
        assert complete(parallel, **body) == alone
        assert chat(parallel, **thought) == chat(server, **thought)
