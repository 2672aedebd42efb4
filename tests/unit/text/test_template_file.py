from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from toka_async.config import ModelConfig
from toka_async.text.chat import ChatTemplateError
from toka_async.text.template_file import load_chat_template
from toka_async.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), {"bos_token": "<s>"}, template)


def test_the_tokenizers_own_template() -> None:
    template = load_chat_template(ModelConfig(), tokenizer("{{ bos_token }}{{ messages[0].content }}"))
    assert template is not None
    assert template.render(MESSAGES) == "<s>hi"
    assert load_chat_template(ModelConfig(), tokenizer(None)) is None


def test_a_configured_template_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("other {{ messages[0].content }}")
    template = load_chat_template(ModelConfig(chat_template=str(path)), tokenizer("own"))
    assert template is not None
    assert template.render(MESSAGES) == "other hi"


def test_a_template_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ChatTemplateError, match=r"model\.chat_template=.*template\.jinja"):
        load_chat_template(ModelConfig(chat_template=str(path)), tokenizer(None))
    path.write_text("{% if %}")
    with pytest.raises(ChatTemplateError, match="line 1"):
        load_chat_template(ModelConfig(chat_template=str(path)), tokenizer(None))
