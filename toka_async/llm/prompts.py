"""The forms of a prompt: text, token ids, or a dict with either. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

import msgspec
import numpy as np

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


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
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
    if isinstance(prompts, str | Mapping) or is_token_ids(prompts):
        return [read_prompt(prompts, "the prompt")]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(f"prompts: expected text, token ids or a list of prompts, got {type(prompts).__name__}")
    return [read_prompt(prompt, f"prompt {place}") for place, prompt in enumerate(prompts)]


def is_token_ids(value: Any) -> bool:
    """Tell whether it is a sequence of integers; an empty one is not."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], int | np.integer)


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
    if not (text is None or isinstance(text, str)):
        raise ValueError(f"{name}: 'prompt' must be text, not {type(text).__name__}")
    if text is None and ids is None:
        raise ValueError(f"{name}: a dict needs 'prompt' or 'prompt_token_ids'")
    return PlainPrompt(text, None if ids is None else read_token_ids(ids, name), salt)


def read_token_ids(ids: Any, name: str) -> list[int]:
    if not is_token_ids(ids):
        is_empty = isinstance(ids, Sequence | np.ndarray) and not len(ids)
        what = "has no tokens" if is_empty else "is not text or token ids"
        raise ValueError(f"{name} {what}")
    listed: list[int] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if wrong := [kind.__name__ for kind in set(map(type, listed)) if not issubclass(kind, int | np.integer)]:
        raise ValueError(f"{name}: token ids must be integers, not {wrong[0]}")
    return listed
