"""The engine from Python without a server: `LLM`, `AsyncLLM`, and what goes in and comes out of them.

Names, defaults and forms are vLLM's. Loads no torch and no web server; those are in the engine's processes.
"""

from toka_async.llm.async_llm import AsyncLLM
from toka_async.llm.engine_options import EngineArgs
from toka_async.llm.engine_process import EngineDeadError
from toka_async.llm.llm import LLM
from toka_async.llm.outputs import CompletionOutput, Logprob, RequestOutput
from toka_async.llm.prompts import TextPrompt, TokensPrompt
from toka_async.llm.sampling_params import (
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

AsyncEngineArgs = EngineArgs

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
]
