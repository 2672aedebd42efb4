"""vLLM's own routes: the handler of each, and its description for the document."""

from __future__ import annotations

from toka_async.openai.responses import Health
from toka_async.server.http import info as own
from toka_async.server.http.document import Operation
from toka_async.server.http.routes import OF_GENERATION, Routes
from toka_async.server.vllm import control, info, memory, weights
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
            event=(GeneratedTokensChunk,),
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
    ("GET", "/is_sleeping"): (
        memory.is_sleeping,
        Operation(name="isSleeping", summary="Whether the cache has no memory", answer=memory.SleepInfo),
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
    ("POST", "/inference/v1/abort_requests"): (
        control.abort_requests,
        Operation(
            name="abortRequestsToo",
            summary="Another name of /abort_requests",
            body=control.AbortRequest,
            needs_body=False,
            answer=control.Aborted,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/init_weight_transfer_engine"): (
        weights.init_weight_transfer_engine,
        Operation(
            name="initWeightTransferEngine",
            summary="Join the trainer's communicator with all ranks",
            body=weights.OpenRequest,
            answer=weights.Told,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/shutdown_weight_transfer_engine"): (
        weights.shutdown_weight_transfer_engine,
        Operation(
            name="shutdownWeightTransferEngine",
            summary="Leave the trainer's communicator",
            body=control.NothingRequest,
            needs_body=False,
            answer=weights.Told,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/start_weight_update"): (
        weights.start_weight_update,
        Operation(
            name="startWeightUpdate",
            summary="Compute nothing until the update is finished",
            body=weights.StartRequest,
            needs_body=False,
            answer=weights.Told,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/update_weights"): (
        weights.update_weights,
        Operation(
            name="updateWeights",
            summary="Tensors of the update, or all files of a folder",
            body=weights.UpdateRequest,
            answer=weights.Told,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/finish_weight_update"): (
        weights.finish_weight_update,
        Operation(
            name="finishWeightUpdate",
            summary="Compute with the new weights, if all have come",
            body=weights.FinishRequest,
            needs_body=False,
            answer=weights.Told,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/update_weight_version"): (
        weights.update_weight_version,
        Operation(
            name="updateWeightVersion",
            summary="Name the weights that are there",
            body=weights.VersionRequest,
            answer=weights.VersionSet,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/weight_checker"): (
        weights.weight_checker,
        Operation(
            name="checkWeights",
            summary="Sums of all tensors, or a comparison with earlier ones",
            body=weights.CheckRequest,
            answer=weights.WeightsChecked,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/collective_rpc"): (
        weights.collective_rpc,
        Operation(
            name="collectiveRpc",
            summary="SkyRL's methods of an update",
            body=weights.RpcRequest,
            answer=weights.RpcResults,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/sleep"): (
        memory.sleep,
        Operation(
            name="sleep",
            summary="Pause, and give the memory of the cache back",
            query=memory.SLEEP_QUERY,
            body=control.NothingRequest,
            needs_body=False,
            answer=memory.Slept,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/wake_up"): (
        memory.wake_up,
        Operation(
            name="wakeUp",
            summary="Take the memory of the cache again, and go on",
            query=memory.TAGS,
            body=control.NothingRequest,
            needs_body=False,
            answer=memory.Woken,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/release_kv_cache_memory"): (
        memory.release_kv_cache_memory,
        Operation(
            name="releaseCacheMemory",
            summary="Give the memory of the cache back while paused",
            body=control.NothingRequest,
            needs_body=False,
            answer=memory.Released,
            statuses=OF_CONTROL,
        ),
    ),
}
