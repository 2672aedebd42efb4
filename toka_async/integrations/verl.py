"""verl: `actor_rollout_ref.rollout.name=toka`, with VERL_USE_EXTERNAL_MODULES=toka_async.integrations.verl.

Registers a replica, whose Ray actor hosts an engine, and the rollout of verl's workers, which sends it their weights.
Checked against verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import ray
import torch
from msgspec.structs import replace
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_resource_name
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from toka_async.client import Result
from toka_async.control import CudaBucket
from toka_async.integrations.hosted_engine import HostedEngine
from toka_async.transfer.buckets import Bucket, BucketWriter, CudaWriter, ShmWriter
from toka_async.transfer.tensors import TensorInfo

NAME = "toka"
TIMEOUT = 600.0  # seconds that ranks wait for each other's part of a filling
STOP_REASONS: Mapping[str | None, str] = {"stop": "completed", "length": "completed", "abort": "aborted"}


class VerlServer:
    """The actor of a replica: verl's calls of a server, for an engine of its own.

    gpus: ids of those of the replica's workers.
    """

    def __init__(self, config: Any, model_config: Any, mode: Any, replica_rank: int, gpus: Sequence[str]) -> None:
        model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)  # has a local copy
        if (model.lora_rank > 0 or model.lora.get("rank", 0) > 0) and not model.lora.get("merge", False):
            raise ValueError("toka: LoRA adapters are not supported; set model.lora.merge")
        self._config = config
        self._mode = mode
        self._seed = replica_rank + config.seed if config.full_determinism else None
        self._engine = HostedEngine(model.local_path, make_options(config), gpus)
        self._is_aborted = self._rejects = False
        self._parts: list[Bucket] = []  # of a filling, from the ranks that have come
        self._loaded: asyncio.Future[None] | None = None

    async def launch_server(self) -> tuple[str, int]:
        """Wait until the engine serves; returns the address of its HTTP server. Raises ReplicaStartError."""
        await self._engine.start()
        return self.get_server_address()

    def get_server_address(self) -> tuple[str, int]:
        parts = urlsplit(self._engine.url)
        return parts.hostname or "", parts.port or 0

    def get_rollout_config(self) -> Any:
        return self._config

    # ---- generation --------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,  # noqa: ARG002
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002
        priority: int = 0,
    ) -> Any:
        """Generate a sample. It waits while generation is paused. Raises RequestError."""
        if image_data or video_data or audio_data:
            raise ValueError("toka: images, videos and sound are not supported")
        if self._rejects:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        config, ids, fields = self._config, list(prompt_ids), dict(sampling_params)
        room = self._engine.max_context - len(ids)
        if room < 1:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in {self._engine.max_context}")
        rest = min(config.response_length, config.prompt_length + config.response_length - len(ids))
        most = fields.pop("max_new_tokens", rest)
        fields["max_tokens"] = max(1, min(fields.get("max_tokens", most), room))
        wants_logprobs = fields.pop("logprobs", False)
        fields |= {"logprobs": 0} if wants_logprobs else {}
        defaults = {"repetition_penalty": config.repetition_penalty, "ignore_eos": config.ignore_eos}
        seed = fields.pop("seed", self._seed)
        fields = defaults | fields | {"priority": priority, "text": False}
        result = await self._engine.client.generate(ids, seed=seed, **fields)
        return make_output(ids, result, bool(wants_logprobs), fields.get("prompt_logprobs"))

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End all requests, and compute nothing until `resume_generation`. reject_request: later requests end too."""
        self._is_aborted, self._rejects = True, reject_request
        await self._engine.trainer.pause("abort")
        if reset_prefix_cache:
            await self._engine.trainer.reset_prefix_cache()
        return {}

    async def resume_generation(self) -> None:
        await self._engine.trainer.resume()
        self._is_aborted = self._rejects = False

    async def clear_kv_cache(self) -> None:
        await self._engine.trainer.reset_prefix_cache()

    # ---- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Let running requests end, and give the memory of the cache back. Weights stay."""
        if self._config.free_cache_engine and self._mode != RolloutMode.STANDALONE:
            await self._give_cache_back("wait")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again. Weights are there always: waking them alone changes nothing."""
        if self._mode != RolloutMode.STANDALONE and (tags is None or "kv_cache" in tags):
            await self._engine.trainer.wake()
            if not self._is_aborted:
                await self._engine.trainer.resume()

    async def release_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.COLOCATED:
            await self._give_cache_back("retract")

    async def resume_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.COLOCATED:
            await self._engine.trainer.wake()

    async def _give_cache_back(self, mode: Any) -> None:
        if not (await self._engine.trainer.state()).is_asleep:
            await self._engine.trainer.sleep(1, mode)

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        self._parts.clear()
        await self._engine.trainer.begin_update()

    async def load(self, infos: Sequence[TensorInfo], bucket: Bucket, num_parts: int) -> None:
        """Load a filling, once so many ranks have come with theirs: the same tensors, each on its own GPU."""
        if self._loaded is None:
            self._loaded = asyncio.get_running_loop().create_future()
        loaded = self._loaded
        self._parts.append(bucket)
        if len(self._parts) == num_parts:
            parts, self._parts, self._loaded = self._parts, [], None
            try:
                await self._engine.trainer.load(join_parts(parts), infos)
            except Exception as error:
                loaded.set_exception(error)
            else:
                loaded.set_result(None)
        async with asyncio.timeout(TIMEOUT):
            await asyncio.shield(loaded)

    async def finish_update(self, version: str | None) -> None:
        await self._engine.trainer.finish_update(version)

    async def abandon_update(self) -> None:
        self._parts, self._loaded = [], None
        if (await self._engine.trainer.state()).is_updating:
            await self._engine.trainer.abandon_update()

    async def set_global_steps(self, global_steps: int) -> None:
        await self._engine.trainer.set_version(str(global_steps))

    async def checksum(self) -> dict[str, str]:
        return await self._engine.trainer.checksum()

    async def start_profile(self, **_: Any) -> None:
        """There is nothing to start: a configuration with a profile of rollouts is refused."""

    async def stop_profile(self) -> None:
        """See `start_profile`."""

    async def stop(self) -> None:
        await self._engine.stop()


class TokaReplica(RolloutReplica):  # type: ignore[misc]
    """A replica on the GPUs of its workers, which are on one node."""

    async def launch_servers(self) -> None:
        if self.nnodes > 1:
            raise ValueError("toka: a replica has the GPUs of one node; lower its tp, dp or pp")
        places = await asyncio.gather(*(worker.__ray_call__.remote(find_place) for worker in self.workers))
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        actor: Any = ray.remote(VerlServer)
        server = actor.options(
            name=f"{NAME}_server_{kind}{self.replica_rank}{self.name_suffix}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(places[0][0], soft=False),
            max_concurrency=self.max_concurrency,
        ).remote(self.config, self.model_config, self.rollout_mode, self.replica_rank, [gpu for _, gpu in places])
        host, port = await server.launch_server.remote()
        self.servers, self._server_handle, self._server_address = [server], server, f"{host}:{port}"


class TokaRollout(BaseRollout):  # type: ignore[misc]
    """A worker's end of its replica: sends weights, and has the memory of the cache given back."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        config = self.config
        rank, self._size = int(os.environ["RANK"]), count_ranks(config)
        self.replica_rank = rank // self._size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % self._size == 0
        self._found: Any = None

    @property
    def _server(self) -> Any:
        """The actor starts after the workers."""
        if self._found is None:
            self._found = ray.get_actor(f"{NAME}_server_{self.replica_rank}")
        return self._found

    async def resume(self, tags: Sequence[str]) -> None:
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.wake_up.remote(tags)

    async def release(self) -> None:
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterator[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        base_sync_done: bool = True,  # noqa: ARG002
    ) -> None:
        """Send all tensors. On GPUs every rank shares its own copies with the engine's rank there; elsewhere the first
        rank shares memory of the host. Raises CommandError, which names the tensor at fault.
        """
        if wire_format != "named_tensors" or peft_config is not None:
            raise ValueError("toka: deltas and LoRA adapters are not supported; send whole tensors")
        num_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        has_gpu = torch.cuda.is_available()
        if self.is_leader_rank:
            await self._server.begin_update.remote()
        writer: BucketWriter | None = None
        if has_gpu:
            writer = CudaWriter(num_bytes, torch.device("cuda", torch.cuda.current_device()))
        elif self.is_leader_rank:
            writer = ShmWriter(f"toka-verl-{secrets.token_hex(8)}", num_bytes)
        num_parts = self._size if has_gpu else 1
        try:
            async for name, tensor in ensure_async_iterator(weights):  # all ranks take part in making them
                if writer is not None and not writer.add(name, tensor):
                    await self._server.load.remote(*writer.take(), num_parts)
                    writer.add(name, tensor)
            if writer is not None:
                await self._server.load.remote(*writer.take(), num_parts)
        except BaseException:
            await self._server.abandon_update.remote()
            raise
        finally:
            if writer is not None:
                writer.close()
        if self.is_leader_rank:
            await self._server.finish_update.remote(None if global_steps is None else str(global_steps))


def make_options(config: Any) -> dict[str, Any]:
    """Make the engine's options of verl's. Raises ValueError for what it cannot do."""
    refused = {
        "disaggregation.enabled": config.disaggregation.enabled,
        "mtp.enable_rollout": config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout,
        "enable_rollout_routing_replay": config.enable_rollout_routing_replay,
        "profiler.enable": config.profiler is not None and config.profiler.enable,
        "qat.enable": (config.qat or {}).get("enable", False),
        "quantization_config_file": config.quantization_config_file,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(f"toka: rollout.{name} is not supported")
    return {
        "parallel.tp": config.tensor_model_parallel_size,
        "parallel.pp": config.pipeline_model_parallel_size,
        "parallel.dp": config.data_parallel_size,
        "parallel.ep": config.expert_parallel_size,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "quantization": config.quantization,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": config.logprobs_mode,
        "model.batch_invariant": config.full_determinism,
        "model.generation_config": "none",
        "served_model_name": config.prometheus.served_model_name,
        "limits.max_logprobs": -1,
        **((config.engine_kwargs or {}).get(NAME) or {}),
    }


def make_output(prompt_ids: Sequence[int], result: Result, wants_logprobs: bool, num_prompt: int | None) -> Any:
    """Make verl's output of a sample.

    num_prompt: how many of the likeliest tokens are wanted for each token of the prompt but the first; 0: its own.
    """
    (sample,) = result.samples
    steps = [int(span.version) for span in sample.versions if span.version.isdecimal()]
    extra: dict[str, Any] = {
        "global_steps": steps[-1] if steps else None,
        "min_global_steps": min(steps, default=None),
        "max_global_steps": max(steps, default=None),
        "num_cached_tokens": result.cached_tokens,
    }
    if num_prompt is not None and result.prompt is not None:
        width, scores = max(num_prompt, 1), result.prompt
        own = [[each] for each in scores.logprobs.tolist()], [[each] for each in prompt_ids[1:]]
        values, ids = own if not num_prompt else (scores.top_logprobs.tolist(), scores.top_ids.tolist())
        extra |= {"prompt_logprobs": [*values, [0.0] * width], "prompt_ids": [*ids, [0] * width]}
    return TokenOutput(
        token_ids=sample.token_ids.tolist(),
        log_probs=sample.logprobs.tolist() if wants_logprobs else None,
        stop_reason=STOP_REASONS.get(sample.finish_reason, sample.finish_reason),
        extra_fields=extra,
    )


def join_parts(parts: Sequence[Bucket]) -> Bucket:
    """Make one bucket of the ranks' ones, which have the same tensors at the same places."""
    on_gpus = [part for part in parts if isinstance(part, CudaBucket)]
    if not on_gpus:
        return parts[0]
    return replace(on_gpus[0], handles=tuple(handle for part in on_gpus for handle in part.handles))


def count_ranks(config: Any) -> int:
    size: int = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
    return size


def find_place(_worker: object) -> tuple[str, str]:
    """Find the node of the worker that runs this, and the id of its GPU."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


RolloutReplicaRegistry.register(NAME, lambda: TokaReplica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{TokaRollout.__name__}"
