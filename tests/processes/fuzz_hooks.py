"""Hooks of schemathesis: its command loads this module (SCHEMATHESIS_HOOKS=tests.processes.fuzz_hooks).

A schema cannot tell the rules that tie fields together, so that most of what it allows is an error of the client's. Of
the valid cases half are made to keep the rules, so that much is generated and answered. FUZZ_FILE and FUZZ_BATCH name
a file and a batch that exist.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import schemathesis

NEEDED = {"top_logprobs": "logprobs", "stream_options": "stream"}


@schemathesis.hook
def map_case(context: schemathesis.HookContext, case: schemathesis.Case[Any]) -> schemathesis.Case[Any]:
    """Half of the valid cases of the fuzzing phase."""
    del context
    meta = case.meta
    if meta is None or meta.generation.mode is not schemathesis.GenerationMode.POSITIVE:
        return case
    if meta.phase.name.value != "fuzzing" or zlib.crc32(repr((case.body, case.path_parameters)).encode()) % 2:
        return case
    for place, name in (("file", "FUZZ_FILE"), ("batch", "FUZZ_BATCH")):
        if place in case.path_parameters and case.method != "DELETE":
            case.path_parameters[place] = os.environ[name]
    if isinstance(case.body, dict) and case.media_type == "application/json":
        case.body = kept(case.body)
    return case


def kept(body: dict[str, Any]) -> dict[str, Any]:
    """A body that keeps the rules."""
    body = {name: value for name, value in body.items() if value is not None}
    for name, needed in NEEDED.items():
        if not body.get(needed):
            body.pop(name, None)
    for name in ("best_of", "min_tokens", "max_completion_tokens", "chat_template_kwargs", "continue_final_message"):
        body.pop(name, None)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    if "max_tokens" in body:
        body["max_tokens"] = min(body["max_tokens"], 8)
    if "input_file_id" in body:
        body["input_file_id"] = os.environ["FUZZ_FILE"]
    if "messages" in body:
        body.pop("prompt", None)
        body["messages"] = [plain(message) for message in body["messages"]][:4]
    elif body.get("prompt") in ("", [""]):
        body["prompt"] = "x"
    return body


def plain(message: Any) -> Any:
    """A message, or the messages of a conversation, as the built-in model's template takes them."""
    if isinstance(message, list):
        return [plain(each) for each in message][:4]
    return {"role": "user", "content": message.get("content") or "x"}
