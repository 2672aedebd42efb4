"""Arguments of vLLM's methods that the engine has no counterpart for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEUTRAL: Mapping[str, tuple[Any, ...]] = {"chat_template_content_format": ("auto", "string")}
KNOWN = {
    "lora_request": "LoRA adapters are not supported; merge the adapter into the checkpoint",
    "tokenization_kwargs": "give token ids of your own tokenizer, as TokensPrompt",
    "mm_processor_kwargs": "only text is supported",
    "chat_template_content_format": "templates get contents as text",
    "prompt_adapter_request": "adapters are not supported",
    "trace_headers": "requests are not traced",
    "data_parallel_rank": "the engine chooses the replica that has the beginning of the prompt",
}


def check_arguments(others: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown argument, and ValueError for one that is not supported and asks for something."""
    for name, value in others.items():
        if name not in KNOWN:
            raise TypeError(f"unexpected argument {name!r}")
        if value and value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{name}: {KNOWN[name]}")
