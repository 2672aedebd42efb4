"""toka-async: an LLM inference engine for high-throughput work."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # otherwise `__getattr__` loads them
    from toka_async.llm import (
        LLM,
        AsyncEngineArgs,
        AsyncLLM,
        CompletionOutput,
        EngineArgs,
        EngineDeadError,
        GuidedDecodingParams,
        Logprob,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "GuidedDecodingParams",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load a name of `toka_async.llm` when it is first used: commands and processes need none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("toka_async.llm"), name)
