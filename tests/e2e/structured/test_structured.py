"""Structured output through whole servers: every route's fields, and models in parallel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.cases.grammars import ORDER
from tests.processes.serving import Serving, free_port, serving
from toka_async.client import SyncClient

SCHEMA = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER, "strict": True}}
PROMPTS = [f"Question: Mia buys {number} pens.\nAnswer:" for number in range(25)]


URL = f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("structured"), f"zmq.bind={URL}") as running:
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
    assert [choice.message.content for choice in cut.choices] == [text.partition('"state"')[0] for text in texts]


def test_other_routes(server: Serving) -> None:
    params = {"regex": "[ab]{3}", "max_new_tokens": 9}
    assert re.fullmatch("[ab]{3}", ask(server, "/generate", {"text": "x", "sampling_params": params})["text"])
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
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    server: Serving, fields: dict[str, Any], param: str, word: str
) -> None:
    status, answer = server.post("/v1/completions", prompt="x", **fields)
    error = answer["error"]
    assert (status, error["param"]) == (400, param)
    assert word in error["message"]


def test_metrics_count_it(server: Serving) -> None:
    complete(server, regex="a{9}")
    assert server.metric("grammar_tokens_total") > 0


@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.pp=2"])
def test_models_in_parallel_draw_the_same(server: Serving, tmp_path: Path, layout: str) -> None:
    body = {"prompt": PROMPTS[:4], "n": 3, "temperature": 0.7, "response_format": SCHEMA}
    alone = complete(server, **body)
    check_orders(alone)
    with serving(tmp_path, layout) as parallel:
        assert complete(parallel, **body) == alone
