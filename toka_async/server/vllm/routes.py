"""vLLM's own routes: the handler of each, and its description for the document."""

from __future__ import annotations

from toka_async.openai.responses import Health
from toka_async.server.http import info as own
from toka_async.server.http.document import Operation
from toka_async.server.http.routes import OF_GENERATION, Routes
from toka_async.server.vllm import control, info
from toka_async.server.vllm.requests import TokensRequest
from toka_async.server.vllm.responses import GeneratedTokens, GeneratedTokensChunk
from toka_async.server.vllm.tokens import generate_tokens

OF_CONTROL = (409, 504)  # it failed on a replica; a replica did not answer in time

ROUTES: Routes = {
    ("POST", "/inference/v1/generate"): (
        generate_tokens,
        Operation(
            name="generateTokens",
            summary="Token ids that follow a prompt of token ids, as vLLM's",
            body=TokensRequest,
            answer=GeneratedTokens,
            event=GeneratedTokensChunk,
            statuses=OF_GENERATION,
        ),
    ),
    ("GET", "/get_world_size"): (
        info.get_world_size,
        Operation(name="getWorldSize", summary="The number of ranks", query=info.SIZE_QUERY, answer=info.WorldSize),
    ),
    ("GET", "/weight_info"): (
        info.get_weight_info,
        Operation(name="getWeightInfo", summary="The version of the weights", answer=info.WeightInfo),
    ),
    ("GET", "/is_paused"): (
        info.is_paused,
        Operation(name="isPaused", summary="Whether a trainer has paused the engine", answer=info.PauseInfo),
    ),
    ("GET", "/server_info"): (
        info.get_server_info,
        Operation(
            name="getServerInfo",
            summary="How the model is run, with vLLM's and with SGLang's names",
            query=info.INFO_QUERY,
            answer=info.ServerInfo,
        ),
    ),
    ("GET", "/tokenizer_info"): (
        info.get_tokenizer_info,
        Operation(name="getTokenizerInfo", summary="Special tokens and the chat template", answer=info.TokenizerInfo),
    ),
    ("GET", "/liveness"): (
        own.ping,
        Operation(name="liveness", summary="The server's process answers, as prime-rl asks", answer=Health),
    ),
}
ADMIN_ROUTES: Routes = {
    ("POST", "/pause"): (
        control.pause,
        Operation(
            name="pause",
            summary="Compute nothing until /resume; requests end, run to their ends or wait",
            query=control.PAUSE_QUERY,
            body=control.NothingRequest,
            needs_body=False,
            answer=control.Done,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/resume"): (
        control.resume,
        Operation(
            name="resume",
            summary="Go on after /pause",
            body=control.NothingRequest,
            needs_body=False,
            answer=control.Done,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/abort_requests"): (
        control.abort_requests,
        Operation(
            name="abortRequests",
            summary="End requests with the tokens that they have: these, or all",
            body=control.AbortRequest,
            needs_body=False,
            answer=control.Aborted,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/reset_prefix_cache"): (
        control.reset_prefix_cache,
        Operation(
            name="resetPrefixCache",
            summary="Forget cached prompts",
            query=control.RESET_QUERY,
            body=control.ResetRequest,
            needs_body=False,
            answer=control.Success,
            statuses=OF_CONTROL,
        ),
    ),
}
