"""Loads the chat template that a configuration names, or the tokenizer's own, and finds the format of its answers."""

from __future__ import annotations

from pathlib import Path

from toka_async.config import ModelConfig
from toka_async.text.chat import ChatTemplate, ChatTemplateError
from toka_async.text.formats.choice import ResponseFormat, choose_format
from toka_async.text.formats.template import ResponseTemplateError
from toka_async.text.tokenizer import Tokenizer


def load_chat_template(model: ModelConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the configured file, otherwise the tokenizer's own template, if any."""
    source = tokenizer.chat_template
    if model.chat_template:
        try:
            source = Path(model.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"model.chat_template={model.chat_template}: cannot be read: {error}") from error
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)


def find_response_format(
    model: ModelConfig, tokenizer: Tokenizer, chat_template: ChatTemplate | None
) -> ResponseFormat | None:
    """Find how answers to chats are written. Raises ChatTemplateError for a malformed response template."""
    source = "" if chat_template is None else chat_template.source
    try:
        return choose_format(source, model.tool_format, model.reasoning_format, tokenizer.response_template)
    except ResponseTemplateError as error:
        raise ChatTemplateError(f"response_template of the tokenizer: {error}") from error
