"""The forms of a prompt: text, token ids, or a dict with either. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict

import msgspec
import numpy as np

Integer = int | np.integer
MEDIA = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds", "token_type_ids")


class TextPrompt(TypedDict):
    """A text to tokenize. Only requests of equal `cache_salt` share cached prompts."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids. prompt: their text, if it is known, for the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class Listable(Protocol):
    """An array or a column of NumPy, torch, pandas or the like."""

    def tolist(self) -> Any: ...


PromptType: TypeAlias = str | Sequence[int] | Listable | TextPrompt | TokensPrompt
Prompts: TypeAlias = PromptType | Sequence[PromptType]


class PlainPrompt(msgspec.Struct, gc=False):
    """A prompt in one form. token_ids: None until the text is tokenized. is_complete: the text has all special tokens
    that it needs.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    is_complete: bool = False


def list_prompts(prompts: Prompts) -> list[PlainPrompt]:
    """List the prompts of a call: one of any form, or a sequence of them.

    Raises:
        ValueError: something is no prompt; the message has its place.
    """
    plain = make_plain(prompts)
    if isinstance(plain, str | Mapping) or (
        isinstance(plain, list | tuple) and plain and isinstance(plain[0], Integer)
    ):
        return [read_prompt(plain, "the prompt")]
    if not isinstance(plain, Sequence) or isinstance(plain, bytes):
        raise ValueError(f"prompts: expected text, token ids or a list of prompts, got {type(prompts).__name__}")
    return [read_prompt(prompt, f"prompt {place}") for place, prompt in enumerate(plain)]


def read_prompt(prompt: Any, name: str) -> PlainPrompt:
    """Read a prompt; `name` is what errors call it. Raises ValueError."""
    if isinstance(prompt, str):
        return PlainPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return PlainPrompt(None, read_token_ids(prompt, name))
    for key, value in prompt.items():
        if key not in ("prompt", "prompt_token_ids", "cache_salt") and value:
            reason = "only text and token ids are supported" if key in MEDIA else "a prompt has no such key"
            raise ValueError(f"{name}: {key!r}: {reason}")
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    for key, value in (("prompt", text), ("cache_salt", salt)):
        if not (value is None or isinstance(value, str)):
            raise ValueError(f"{name}: {key!r} must be text, not {type(value).__name__}")
    if text is None and ids is None:
        raise ValueError(f"{name}: a dict needs 'prompt' or 'prompt_token_ids'")
    return PlainPrompt(text, None if ids is None else read_token_ids(ids, name), salt)


def read_token_ids(ids: Any, name: str) -> list[int]:
    """Read token ids, of a list or an array, as integers of Python. Raises ValueError."""
    plain = make_plain(ids)
    if not isinstance(plain, list | tuple):
        raise ValueError(f"{name} is not text or token ids, but {type(ids).__name__}")
    if not plain:
        raise ValueError(f"{name} has no tokens")
    kinds = set(map(type, plain))
    if wrong := [kind.__name__ for kind in kinds if kind is bool or not issubclass(kind, Integer)]:
        raise ValueError(f"{name}: token ids must be integers, not {wrong[0]}")
    return list(plain) if kinds == {int} else list(map(int, plain))


def make_plain(value: Any) -> Any:
    """Make a list of what has one."""
    return value.tolist() if hasattr(value, "tolist") else value
