"""Which field names a request may carry, beyond the ones its Struct has.

A field that cannot be honoured is an error, never ignored. A known one may still be given its neutral value, the one
that asks for nothing: `store: false`. Knows names and values, not what the supported fields mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from toka_async.openai.errors import bad_request

MAX_SHOWN = 64  # characters of an unknown name in an error

# Known fields of OpenAI's API and of other servers that are not supported, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # without tools, neither asks for anything
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


def check_names(names: Iterable[str], supported: frozenset[str]) -> None:
    """Raises ApiError (400) for a name that is neither supported nor known; says which name is near."""
    for name in names:
        if name in supported:
            continue
        name = name[:MAX_SHOWN]
        near = difflib.get_close_matches(name, supported, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise bad_request(f"unknown field '{name}'{hint}", param=name)


def drop_neutral(fields: dict[str, Any], supported: frozenset[str]) -> dict[str, Any]:
    """`fields` without nulls and without unsupported fields at their neutral value.

    Raises:
        ApiError: 400, an unsupported field has another value.
    """
    kept = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in UNSUPPORTED and name not in supported:
            if any(same(value, neutral) for neutral in UNSUPPORTED[name]):
                continue
            raise bad_request(f"'{name}' is not supported{instead(name)}", param=name, code="unsupported_parameter")
        kept[name] = value
    return kept


def same(value: Any, neutral: Any) -> bool:
    """Equal, and not by a bool standing for a number."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def instead(name: str) -> str:
    """What to write instead of an unsupported value, for an error message."""
    neutral = UNSUPPORTED[name]
    return f" (only {' or '.join(map(repr, neutral))})" if neutral else ""
