"""Methods of vLLM's `LLM` and `AsyncLLM`, and arguments of them, that the engine has no counterpart for."""

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
NOT_TRAINED_FOR = "models that make vectors or scores are not supported"
BY_LOGPROBS = "not supported; for the log-likelihood of a text use generate with SamplingParams(prompt_logprobs=0)"
IN_RANKS = "no code of callers runs in the engine's processes"
MISSING = {
    **dict.fromkeys(("encode", "embed", "classify", "reward", "pooling"), NOT_TRAINED_FOR),
    "score": BY_LOGPROBS,
    "beam_search": "not supported; use SamplingParams(n=…)",
    **dict.fromkeys(("collective_rpc", "apply_model"), IN_RANKS),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "use AsyncLLM, or call generate in a thread"),
    "get_metrics": "not supported; `toka-async serve` has metrics",
    **dict.fromkeys(("start_profile", "stop_profile"), "not supported"),
    "set_tokenizer": "give LLM(tokenizer=…)",
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), KNOWN["lora_request"]),
    "scale_elastic_ep": "not supported",
}


def explain_missing(owner: str, name: str) -> str:
    """Explain why `LLM` or `AsyncLLM`, the owner, has no such attribute."""
    reason = MISSING.get(name)
    return f"{owner!r} object has no attribute {name!r}" if reason is None else f"{owner}.{name}: {reason}"


def check_arguments(others: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown argument, and ValueError for one that is not supported and asks for something."""
    for name, value in others.items():
        if name not in KNOWN:
            raise TypeError(f"unexpected argument {name!r}")
        if value and value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{name}: {KNOWN[name]}")
