"""Parses the four forms of a completion's prompt: a string, strings, token ids, lists of token ids.

Knows no tokenizer: strings stay strings.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from toka_async.arrays import Int32
from toka_async.openai.errors import bad_request

Prompt = str | Int32

LIST_WORK = 32  # token ids that take as long to parse as a list does beside its own


def parse_prompts(prompt: str | list[Any]) -> list[Prompt]:
    """Returns the prompts, each a string or an int32 array of token ids [p], p >= 1.

    Raises ApiError (400) with param `prompt` for an empty prompt, a mixture, or items that are not token ids.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("'prompt' must not be an empty list", param="prompt")
    first, *others = set(map(type, prompt))
    if others:
        raise bad_request("'prompt' must not mix strings, token ids and lists", param="prompt")
    if first is str:
        return list(prompt)
    if first is int:
        return [_take_ids(prompt, "prompt")]
    if first is list:
        return [parse_token_ids(ids) for ids in prompt]
    raise bad_request(
        "'prompt' must be a string, a list of strings, a list of token ids or a list of lists of token ids",
        param="prompt",
    )


def parse_token_ids(items: Sequence[Any], param: str = "prompt") -> Int32:
    """Raises ApiError (400) for an empty list or anything that cannot be a token id."""
    if not len(items):
        raise bad_request(f"'{param}' must not hold an empty list of token ids", param=param)
    if set(map(type, items)) != {int}:
        raise bad_request(f"'{param}': token ids must be integers", param=param)
    return _take_ids(items, param)


def _take_ids(items: Sequence[int], param: str) -> Int32:
    try:
        ids = np.frombuffer(array("i", items), dtype=np.int32)  # array() refuses what has more than 32 bits
    except OverflowError:
        pass
    else:
        if ids.min() >= 0:
            return ids
    raise bad_request(f"'{param}' has a token id out of range", param=param)


def count_work(prompt: str | list[Any]) -> int:
    """Estimates the work of `parse_prompts` in token ids; a string counts as one."""
    if isinstance(prompt, str):
        return 1
    if prompt and isinstance(prompt[0], list):
        return sum(LIST_WORK + len(each) if isinstance(each, list) else 1 for each in prompt)
    return len(prompt)


def check_vocabulary(ids: Int32, vocab_size: int, param: str = "prompt") -> None:
    """Raises ApiError (400) when an id is not below `vocab_size`."""
    if ids.size and int(ids.max()) >= vocab_size:
        raise bad_request(
            f"'{param}' has token id {int(ids.max())}, out of range: the model's vocabulary has {vocab_size} tokens",
            param=param,
        )
