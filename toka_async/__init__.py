"""toka-async: an LLM inference engine for high-throughput work."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` loads
    from toka_async.llm.async_llm import AsyncLLM
    from toka_async.llm.engine_options import EngineArgs
    from toka_async.llm.engine_options import EngineArgs as AsyncEngineArgs
    from toka_async.llm.engine_process import EngineDeadError
    from toka_async.llm.llm import LLM
    from toka_async.llm.outputs import CompletionOutput, Logprob, RequestOutput
    from toka_async.llm.prompts import TextPrompt, TokensPrompt
    from toka_async.llm.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_PLACES = {
    "LLM": "llm.LLM",
    "AsyncEngineArgs": "engine_options.EngineArgs",
    "AsyncLLM": "async_llm.AsyncLLM",
    "CompletionOutput": "outputs.CompletionOutput",
    "EngineArgs": "engine_options.EngineArgs",
    "EngineDeadError": "engine_process.EngineDeadError",
    "Logprob": "outputs.Logprob",
    "RequestOutput": "outputs.RequestOutput",
    "RequestOutputKind": "sampling_params.RequestOutputKind",
    "SamplingParams": "sampling_params.SamplingParams",
    "TextPrompt": "prompts.TextPrompt",
    "TokensPrompt": "prompts.TokensPrompt",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: commands and processes need none of them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(".")
    value = globals()[name] = getattr(import_module(f"toka_async.llm.{module}"), attribute)
    return value
