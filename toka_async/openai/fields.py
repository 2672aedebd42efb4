"""Decides which field names a request may carry beyond those of its Struct.

A field that cannot be honoured is an error, never ignored. An unsupported field may have its neutral value, the one
that asks for nothing: `store: false`. A null means that a field is absent, whatever its name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

from toka_async.openai.errors import ApiError, bad_request

MAX_SHOWN = 64  # characters of an unknown name in an error
NOTHING = {"[]": "an empty list", "{}": "an empty object", '""': "an empty string"}  # words for JSON

Unsupported = Mapping[str, tuple[Any, ...]]  # field name -> neutral values

# Generation fields that OpenAI's API and other servers know. Where a request has several, its error names the
# first of them in this order.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": ("auto", "guidance"),
    "grammar": ("",),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cartridges": ([],),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),  # without tools, neither asks for anything
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_token_offsets": (False,),
    "service_tier": ("auto", "default"),
    "stop_regex": ([],),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


def check_fields(
    fields: dict[str, Any], supported: Collection[str], unsupported: Unsupported, where: str = ""
) -> dict[str, Any]:
    """Returns `fields` without nulls and without unsupported fields at a neutral value.

    `where` is the prefix of names in errors, such as `stream_options.`. Raises ApiError (400) for an unknown name or an
    unsupported field that asks for something.
    """
    refused = []
    for name, value in fields.items():
        if value is None or name in supported:
            continue
        if name not in unsupported:
            raise make_unknown_error(name, supported, where)
        if not any(is_same(value, neutral) for neutral in unsupported[name]):
            refused.append(name)
    if refused:
        raise make_unsupported_error(refused, unsupported, where)
    return {name: value for name, value in fields.items() if value is not None and name in supported}


def make_unknown_error(name: str, supported: Collection[str], where: str) -> ApiError:
    """Returns the error for an unknown name; it suggests the nearest name."""
    name = name[:MAX_SHOWN]
    near = difflib.get_close_matches(name, supported, n=1)
    hint = f"; did you mean '{where}{near[0]}'?" if near else ""
    return bad_request(f"unknown field '{where}{name}'{hint}", param=where + name)


def make_unsupported_error(names: Collection[str], unsupported: Unsupported, where: str) -> ApiError:
    """Returns the error for unsupported fields; it is about the first of them in the order of `unsupported`."""
    first, *rest = [where + name for name in unsupported if name in names]
    nor = f"; nor {'are' if len(rest) > 1 else 'is'} {', '.join(rest)}" if rest else ""
    neutral = " or ".join(describe(value) for value in unsupported[first.removeprefix(where)])
    instead = f"leave it out, or give {neutral}" if neutral else "leave it out"
    return bad_request(f"'{first}' is not supported{nor}; {instead}", param=first, code="unsupported_parameter")


def is_same(value: Any, neutral: Any) -> bool:
    """Tells whether two values are equal; a bool does not equal a number."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def describe(value: Any) -> str:
    text = json.dumps(value)
    return NOTHING.get(text, text)
