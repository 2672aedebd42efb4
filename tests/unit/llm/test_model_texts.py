from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

import toka_async
from toka_async.config import ModelConfig
from toka_async.llm.model_texts import ModelTexts, list_chats
from toka_async.llm.prompts import PlainPrompt
from toka_async.text.tokenizer import Tokenizer, writes_spaces

DEMO = Path(toka_async.__file__).parent / "demo"
MESSAGES = [{"role": "user", "content": "hi"}]
SOURCE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


def render(texts: ModelTexts, **options: Any) -> PlainPrompt:
    given: dict[str, Any] = {
        "template": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
        "kwargs": None,
    }
    return texts.render(options.pop("messages", MESSAGES), **(given | options))


@pytest.fixture(scope="module")
def texts() -> ModelTexts:
    return ModelTexts(DEMO, ModelConfig(), None)


def test_only_prompts_without_token_ids_are_tokenized(texts: ModelTexts) -> None:
    prompts = [PlainPrompt("hello", None), PlainPrompt("other", [1]), PlainPrompt("hello", None, is_complete=True)]
    texts.tokenize(prompts)
    assert prompts[0].token_ids == texts.tokenizer.encode("hello")
    assert prompts[1].token_ids == [1]
    assert prompts[2].token_ids == texts.tokenizer.encode("hello", add_special_tokens=False)


def test_templates_come_from_the_model_the_constructor_or_the_call(texts: ModelTexts, tmp_path: Path) -> None:
    assert "hi" in (render(texts).text or "")
    assert render(texts, template=SOURCE).text == "<hi>"
    file = tmp_path / "t.jinja"
    file.write_text("file {{ messages[0].content }}")
    assert render(texts, template=str(file)).text == "file hi"
    assert render(ModelTexts(DEMO, ModelConfig(), SOURCE)).text == "<hi>"
    assert render(ModelTexts(DEMO, ModelConfig(chat_template=str(file)), None)).text == "file hi"


def test_tools_and_names_reach_the_template(texts: ModelTexts) -> None:
    template = "{{ tools[0].name }} {{ mood }}"
    assert render(texts, template=template, tools=[{"name": "f"}], kwargs={"mood": "m"}).text == "f m"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"template": "nowhere"}, "expected Jinja source, or a file"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"template": "{{ raise_exception('no') }}"}, "no"),
    ],
)
def test_mistakes_are_value_errors(texts: ModelTexts, options: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        render(texts, **options)
    assert part in str(caught.value)


def test_some_tokenizers_write_spaces_before_special_tokens(texts: ModelTexts) -> None:
    assert not writes_spaces(texts.tokenizer)
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0}, [])
    )  # without a decoder, tokens are joined by spaces
    assert not writes_spaces(Tokenizer(backend))
    backend.add_special_tokens(["<s>"])
    assert writes_spaces(Tokenizer(backend))


@pytest.mark.parametrize("given", [MESSAGES, [MESSAGES], (MESSAGES, MESSAGES), []])
def test_conversations_are_one_or_many(given: Any) -> None:
    assert list_chats(given) == ([MESSAGES] if given is MESSAGES else list(given))


@pytest.mark.parametrize("given", ["hi", ["hi"], None, MESSAGES[0], [MESSAGES, "hi"], [[]]])
def test_what_is_no_conversation_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="messages: expected"):
        list_chats(given)


def test_a_template_that_is_given_is_checked_at_once(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(SOURCE)
    assert render(ModelTexts(DEMO, ModelConfig(), file)).text == "<hi>"
    for wrong in (tmp_path / "none.jinja", "{% if"):
        with pytest.raises(ValueError, match="template"):
            ModelTexts(DEMO, ModelConfig(), wrong)
