"""A model's texts in this process: prompts to token ids, conversations to prompts. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from toka_async.config import ModelConfig
from toka_async.llm.prompts import PlainPrompt
from toka_async.openai.chat_messages import parse_messages
from toka_async.openai.errors import ApiError
from toka_async.text.chat import ChatTemplate
from toka_async.text.template_file import load_chat_template
from toka_async.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class ModelTexts:
    """Reads the tokenizer's files, and its own chat template when it is first needed.

    Args:
        template: source of a chat template, or a file with one; None: the configured one, or the tokenizer's own.

    Raises:
        TokenizerError: a file is missing or wrong.
        ValueError: `template` is neither.
    """

    def __init__(self, folder: Path, model: ModelConfig, template: Path | str | None) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.load(folder)
        self._model = model
        self._given = template
        self._templates: dict[str | None, ChatTemplate] = {}
        if template is not None:
            self._find_template(template)

    def tokenize(self, prompts: Sequence[PlainPrompt]) -> None:
        """Give token ids to the prompts that have none. Raises TokenizerError."""
        for is_complete in (False, True):
            found = [each for each in prompts if each.token_ids is None and each.is_complete is is_complete]
            texts = [each.text or "" for each in found]
            for each, ids in zip(found, self.tokenizer.encode_batch(texts, not is_complete), strict=True):
                each.token_ids = ids

    def render(
        self,
        messages: Messages,
        *,
        template: Path | str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> PlainPrompt:
        """Render a conversation; the template writes special tokens.

        Raises:
            ValueError: a message is malformed, or there is no template.
            ChatTemplateError: the template is wrong or refuses the messages.
        """
        try:
            parsed = parse_messages([dict(message) for message in messages])
        except ApiError as error:
            raise ValueError(str(error)) from None
        text = self._find_template(template).render(
            parsed,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=kwargs,
        )
        return PlainPrompt(text, None, is_complete=True)

    def _find_template(self, given: Path | str | None) -> ChatTemplate:
        given = self._given if given is None else given
        source = None if given is None else str(given)
        if source not in self._templates:
            self._templates[source] = self._load_template(source)
        return self._templates[source]

    def _load_template(self, source: str | None) -> ChatTemplate:
        """Load a template from its source, or from the file that it names."""
        if source is not None and "{" in source:
            return ChatTemplate(source, self.tokenizer.special_tokens)
        if source is not None and not Path(source).is_file():
            raise ValueError(f"chat_template={source!r}: expected Jinja source, or a file with it")
        model = self._model if source is None else replace(self._model, chat_template=source)
        loaded = load_chat_template(model, self.tokenizer)
        if loaded is None:
            raise ValueError("the tokenizer has no chat template: give one with chat_template=")
        return loaded


def list_chats(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """List the conversations of a call: one, or a sequence of them. Raises ValueError for what is none."""
    chats: Any = [messages] if is_chat(messages) else messages
    if not isinstance(chats, Sequence) or isinstance(chats, str) or not all(map(is_chat, chats)):
        raise ValueError("messages: expected dicts with 'role' and 'content', or a list of such conversations")
    return list(chats)


def is_chat(value: Any) -> bool:
    """Tell whether it is a list of dicts."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)
