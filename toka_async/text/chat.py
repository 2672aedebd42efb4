"""Chat templates: turn messages into a prompt with the Jinja source that comes with a model.

Renders like `apply_chat_template` of transformers 5 (https://huggingface.co/docs/transformers/chat_templating), in a
sandbox and with limits on what a template can compute. Knows no tokens and no requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from toka_async.text.sandbox import BUDGET, BoundedEnvironment, Budget

MAX_CHARS = 1 << 26  # in a rendered prompt
MAX_SHOWN = 1000  # characters of an error message
MAX_FORMAT = 256  # characters of a date format
MAX_RANGE = 1_000_000  # numbers from all calls of range() in one rendering
CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which clients send a message's reasoning
RESERVED = frozenset(
    {BUDGET, "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "range"}
)

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A template does not compile or refuses the messages; the message says why."""


class TemplateKwargsError(ChatTemplateError):
    """A name in `kwargs` is reserved."""


class ChatTemplate:
    """A compiled template.

    Attributes:
        source: as given.
        names: those that it takes from its context, such as `tools`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compiles `source`. Raises ChatTemplateError when it is no template.

        special_tokens: the names that the template sees, such as `bos_token`, with their texts.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._uses_content = "content" in source
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self.names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, ValueError) as error:
            raise ChatTemplateError(f"chat template: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt with all special tokens that it needs; encode it without adding others.

        Args:
            messages: have `role`, `content` (a string, or text parts, which are joined by line feeds) and whatever else
                the template knows; a null counts as absent.
            continue_final_message: ends with the last message's content, for the model to continue.
            kwargs: further names that the template sees, such as `enable_thinking`.

        Raises ChatTemplateError when the template raises an error or exceeds a limit, a message is malformed, or
        `continue_final_message` is impossible; TemplateKwargsError when a name in `kwargs` is reserved.
        """
        kwargs = dict(kwargs or {})
        if taken := sorted(kwargs.keys() & (RESERVED | self._special_tokens.keys())):
            raise TemplateKwargsError(f"chat_template_kwargs must not set {taken[0]!r}")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message needs add_generation_prompt to be false")
        chat = [_message(message) for message in messages]
        if not chat:
            raise ChatTemplateError("messages must not be empty")
        names = self._special_tokens | kwargs | {"tools": None if tools is None else list(tools), "documents": None}
        if continue_final_message:
            return self._render_continued(chat, names)
        return self._render(chat, names, add_generation_prompt)

    def _render_continued(self, chat: list[dict[str, Any]], names: Mapping[str, Any]) -> str:
        content = chat[-1].get("content")
        if not isinstance(content, str) or not self._uses_content:
            raise ChatTemplateError("continue_final_message needs a final message with content")
        chat[-1]["content"] = content + CONTINUE
        text = self._render(chat, names, False)
        place = text.rfind(CONTINUE.strip())
        if place < 0 or content.strip() not in text:
            raise ChatTemplateError("continue_final_message: the chat template leaves out the final message's content")
        if text.startswith(CONTINUE, place):
            return text[:place]
        return text[:place].rstrip()  # the template trims contents

    def _render(self, chat: list[dict[str, Any]], names: Mapping[str, Any], add_generation_prompt: bool) -> str:
        context = {**names, "messages": chat, "add_generation_prompt": add_generation_prompt}
        context |= {"range": _Range(), BUDGET: Budget()}
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise ChatTemplateError(f"chat template: the prompt has more than {MAX_CHARS} characters")
        except ChatTemplateError:
            raise
        except Exception as error:  # templates are programs: they raise anything
            raise ChatTemplateError(f"chat template: {str(error)[:MAX_SHOWN]}") from error
        return "".join(pieces)


def _message(message: Message) -> dict[str, Any]:
    """Copies a message for templates: no nulls, content as one string, reasoning under each of its names."""
    kept = {name: value for name, value in message.items() if value is not None}
    if isinstance(kept.get("content"), list):
        kept["content"] = "\n".join(_read_part(part) for part in kept["content"])
    if reasoning := next((kept[name] for name in REASONING if name in kept), None):
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _read_part(part: object) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            raise ChatTemplateError(f"content parts of type {kind!r} are not supported, only 'text'")
    raise ChatTemplateError("a content part must be an object with type 'text' and a text")


class _Range:
    """A range() that limits all calls of one rendering together, so that nested loops end too."""

    def __init__(self) -> None:
        self._left = MAX_RANGE

    def __call__(self, *args: int) -> range:
        numbers = range(*args)
        self._left -= max(1, len(numbers))
        if self._left < 0:
            raise OverflowError(f"range() gave more than {MAX_RANGE} numbers")
        return numbers


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks the model's words for training, unchanged."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > MAX_FORMAT:
        raise ValueError(f"strftime_now takes a format of at most {MAX_FORMAT} characters")
    return datetime.now().strftime(format)
