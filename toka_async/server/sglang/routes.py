"""SGLang's own routes: the handler of each, and its description for the document."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from toka_async.openai.responses import Health
from toka_async.server.http import info as own
from toka_async.server.http.document import Operation
from toka_async.server.http.routes import OF_GENERATION, Routes
from toka_async.server.sglang import control, info, weights
from toka_async.server.sglang.generate import generate
from toka_async.server.sglang.requests import SglangRequest
from toka_async.server.sglang.responses import SglangSample
from toka_async.server.vllm.info import INFO_QUERY, ServerInfo, WeightInfo, get_server_info, get_weight_info
from toka_async.server.vllm.routes import OF_CONTROL

describe_update = partial(Operation, answer=weights.UpdateOutcome, refusal=weights.UpdateOutcome, statuses=OF_CONTROL)

ROUTES: Routes = {
    ("POST", "/generate"): (
        generate,
        Operation(
            name="generate",
            summary="Samples that go on with one or many prompts, as SGLang's: one, or a list",
            body=SglangRequest,
            answer=SglangSample,
            is_list=True,
            event=(SglangSample,),
            statuses=OF_GENERATION,
        ),
    ),
    ("GET", "/model_info"): (
        info.get_model_info,
        Operation(name="getModelInfo", summary="The served model and its weights' version", answer=info.ModelInfo),
    ),
    ("GET", "/get_model_info"): (
        info.get_model_info,
        Operation(name="getModelInfoToo", summary="The older name of /model_info", answer=info.ModelInfo),
    ),
    ("GET", "/get_server_info"): (
        get_server_info,
        Operation(
            name="getServerInfoToo", summary="The older name of /server_info", query=INFO_QUERY, answer=ServerInfo
        ),
    ),
    ("GET", "/get_weight_version"): (
        get_weight_info,
        Operation(name="getWeightVersion", summary="The version of the weights", answer=WeightInfo),
    ),
    ("GET", "/v1/loads"): (
        info.get_loads,
        Operation(
            name="getLoads",
            summary="How many sequences run and wait on each replica",
            query=info.LOADS_QUERY,
            answer=info.Loads,
        ),
    ),
    ("GET", "/health_generate"): (
        own.health,
        Operation(name="healthGenerate", summary="As /health, which asks every process", answer=Health),
    ),
}
FLUSH = Operation(
    name="flushCache",
    summary="Forget cached prompts",
    query=control.FLUSH_QUERY,
    answer="text/plain",
    statuses=OF_CONTROL,
)
READ = Operation(
    name="getWeightsByName",
    summary="The first rows of a tensor of the checkpoint, as the engine has it",
    body=weights.TensorRequest,
    answer=weights.ROWS,
    statuses=(504,),
)
ADMIN_ROUTES: Routes = {
    ("POST", "/pause_generation"): (
        control.pause_generation,
        Operation(
            name="pauseGeneration",
            summary="Compute nothing until /continue_generation; requests end, or wait",
            body=control.SglangPause,
            needs_body=False,
            answer=control.SglangDone,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/continue_generation"): (
        control.continue_generation,
        Operation(
            name="continueGeneration",
            summary="Go on after /pause_generation",
            body=control.SglangContinue,
            needs_body=False,
            answer=control.SglangDone,
            statuses=OF_CONTROL,
        ),
    ),
    ("GET", "/flush_cache"): (control.flush_cache, FLUSH),
    ("POST", "/flush_cache"): (control.flush_cache, replace(FLUSH, name="flushCacheByPost")),
    ("POST", "/abort_request"): (
        control.abort_request,
        Operation(
            name="abortRequest",
            summary="End the requests of an id, or all, with the tokens that they have",
            body=control.SglangAbort,
            needs_body=False,
            answer=control.SglangDone,
            statuses=OF_CONTROL,
        ),
    ),
    ("POST", "/init_weights_update_group"): (
        weights.init_weights_update_group,
        describe_update(
            name="initWeightsUpdateGroup",
            summary="Join the trainer's group with all ranks",
            body=weights.GroupRequest,
        ),
    ),
    ("POST", "/destroy_weights_update_group"): (
        weights.destroy_weights_update_group,
        describe_update(
            name="destroyWeightsUpdateGroup",
            summary="Leave a group",
            body=weights.LeaveRequest,
        ),
    ),
    ("POST", "/update_weights_from_distributed"): (
        weights.update_weights_from_distributed,
        describe_update(
            name="updateWeightsFromDistributed",
            summary="Tensors that the trainer broadcasts in a group",
            body=weights.DistributedRequest,
        ),
    ),
    ("POST", "/update_weights_from_disk"): (
        weights.update_weights_from_disk,
        describe_update(
            name="updateWeightsFromDisk",
            summary="All tensors, from the files of a folder",
            body=weights.DiskRequest,
        ),
    ),
    ("POST", "/begin_weight_update"): (
        weights.begin_weight_update,
        describe_update(
            name="beginWeightUpdate",
            summary="Compute nothing until /end_weight_update",
            body=weights.BeginRequest,
            needs_body=False,
        ),
    ),
    ("POST", "/end_weight_update"): (
        weights.end_weight_update,
        describe_update(
            name="endWeightUpdate",
            summary="Compute with the new weights, if all have come",
            body=weights.EndRequest,
            needs_body=False,
        ),
    ),
    ("POST", "/weights_checker"): (
        weights.weights_checker,
        Operation(
            name="sumUpWeights",
            summary="Sums of all tensors",
            body=weights.SumsRequest,
            needs_body=False,
            answer=weights.Sums,
            statuses=OF_CONTROL,
        ),
    ),
    ("GET", "/get_weights_by_name"): (weights.get_weights_by_name, READ),
    ("POST", "/get_weights_by_name"): (weights.get_weights_by_name, replace(READ, name="getWeightsByNameByPost")),
    ("POST", "/release_memory_occupation"): (
        weights.release_memory_occupation,
        describe_update(
            name="releaseMemoryOccupation",
            summary="Give the memory of the cache back",
            body=weights.TagsRequest,
            needs_body=False,
        ),
    ),
    ("POST", "/resume_memory_occupation"): (
        weights.resume_memory_occupation,
        describe_update(
            name="resumeMemoryOccupation",
            summary="Take the memory of the cache again",
            body=weights.TagsRequest,
            needs_body=False,
        ),
    ),
}
