from __future__ import annotations

import json
from typing import Any

import pytest

from toka_async.openai.requests import GenerationFields
from toka_async.tables.requests import OURS, TEXT_TOKENS, RowRequests, check_sampling, choose_column, find_fault
from toka_async.tables.source import TableError


def ask(prompt: Any, number: int = 0, **settings: Any) -> tuple[str, dict[str, Any]]:
    line = json.loads(RowRequests("prompt", **settings).make_line(number, prompt))
    assert line["custom_id"] == str(number)
    return line["url"], line["body"]


def test_text_is_continued() -> None:
    assert ask("p") == ("/v1/completions", {"prompt": "p", "n": 1, "max_tokens": TEXT_TOKENS})
    sampling = {"max_tokens": 7, "top_k": 3}
    assert ask("p", n=4, sampling=sampling)[1] == {"prompt": "p", "n": 4, "max_tokens": 7, "top_k": 3}


def test_token_ids_are_continued() -> None:
    assert ask([1, 2], chat=True)[1]["prompt"] == [1, 2]


def test_text_is_a_chat_message() -> None:
    user = {"role": "user", "content": "p"}
    assert ask("p", chat=True) == ("/v1/chat/completions", {"messages": [user], "n": 1})
    assert ask("p", system="s")[1]["messages"] == [{"role": "system", "content": "s"}, user]


def test_messages_lose_what_arrow_adds() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "p", "url": None}], "name": None}]
    expected = [{"role": "user", "content": [{"type": "text", "text": "p"}]}]
    assert ask(messages) == ("/v1/chat/completions", {"messages": expected, "n": 1})


def test_rows_have_their_own_seeds() -> None:
    assert [ask("p", number, seed=5)[1]["seed"] for number in (0, 3)] == [5, 8]


@pytest.mark.parametrize("prompt", [None, 1, [], ["two", "prompts"], [[1], [2]], [True], {"role": "user"}])
def test_a_row_without_a_prompt_is_refused_by_the_server(prompt: Any) -> None:
    url, body = ask(prompt)
    assert url == "/v1/completions"
    assert body["prompt"] is None
    assert "column 'prompt': expected text, token ids or messages, got " in find_fault("prompt", prompt)


def test_a_row_with_a_prompt_has_no_fault() -> None:
    assert [find_fault("prompt", prompt) for prompt in ("", "p", [1], [{"role": "user"}])] == [""] * 4


def test_the_column() -> None:
    assert choose_column(["id", "prompt", "messages"], "") == "messages"
    assert choose_column(["id", "prompt"], "") == "prompt"
    assert choose_column(["id", "prompt"], "id") == "id"
    with pytest.raises(TableError, match="no column 'messages' or 'prompt': choose one of id, text with --column"):
        choose_column(["id", "text"], "")
    with pytest.raises(TableError, match="no column 'question'"):
        choose_column(["id"], "question")


def test_fields_that_the_rows_fill() -> None:
    check_sampling({"top_k": 1, "logprobs": 1})
    with pytest.raises(TableError, match="cannot have n, prompt"):
        check_sampling({"prompt": "p", "n": 2})
    assert {"n", "seed", "stream"} <= OURS & set(GenerationFields.__struct_fields__)
