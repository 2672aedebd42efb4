"""OpenRLHF: `python -m toka_async.integrations.openrlhf OPTIONS` runs `openrlhf.cli.train_ppo_ray OPTIONS` with engines
of ours.

OpenRLHF's own actors run, and what they import from vLLM is this module's: an engine that each actor hosts, sampling
parameters, and the trainer's end of a communicator. vLLM need not be installed. TOKA_OPTIONS has further options of the
engine, as `section.key=value` with blanks between. Checked against OpenRLHF 0.11.2.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from toka_async.client import Sample
from toka_async.control import Broadcast, CudaBucket, CudaHandle, GroupTransfer, NcclTransfer, Source
from toka_async.integrations.hosted_engine import HostedEngine
from toka_async.llm.outputs import CompletionOutput, Logprob, RequestOutput
from toka_async.llm.sampling_params import SamplingParams
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.nccl import join_nccl
from toka_async.transfer.tensors import TensorInfo
from toka_async.transfer.torch_group import join_torch_group

STANDS_FOR = "0.32.0"  # the version of vLLM whose names these are
TIMEOUT = 600.0  # seconds of a broadcast
THEIRS = ("worker_extension_cls", "distributed_executor_backend", "seed")  # options that this file answers itself


class RolloutEngine:
    """What OpenRLHF's actor does with vLLM's engine. The engine starts with the first call."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        given = {name: value for name, value in options.items() if name not in THEIRS}
        words = [word.partition("=") for word in os.environ.get("TOKA_OPTIONS", "").split()]
        own = {
            "limits.max_logprobs": -1,
            "model.generation_config": "none",
            **{name: value for name, _, value in words},
        }
        self._holders = hold_gpus() if options.get("tensor_parallel_size", 1) > 1 else []
        gpus = find_gpus(self._holders) if self._holders else []
        self._engine = HostedEngine(given.pop("model"), {**given, **own}, gpus)
        self._random = Random(options.get("seed"))
        self._group = ""
        self._is_updating = False
        self._num_running = 0
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self._num_running)

    @classmethod
    def from_engine_args(cls, engine_args: Mapping[str, Any]) -> Self:
        """engine_args: vLLM's options by their names."""
        return cls(engine_args)

    async def is_sleeping(self) -> bool:
        """Also waits until the engine serves. Raises ReplicaStartError."""
        if not self._engine.url:
            await self._engine.start()
        return (await self._engine.trainer.state()).is_asleep

    async def generate(
        self, prompt: Mapping[str, Any], sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Yield one output, the whole one. Raises RequestError, and ValueError for a parameter that is wrong."""
        ids = list(prompt["prompt_token_ids"])
        if prompt.get("multi_modal_data"):
            raise ValueError("toka: images are not supported")
        fields = {"max_tokens": self._engine.max_context - len(ids), **sampling_params.make_fields()}
        seed = self._random.getrandbits(63) if sampling_params.seed is None else sampling_params.seed
        self._num_running += 1
        try:
            fields["text"] = sampling_params.detokenize
            result = await self._engine.client.generate(ids, seed=seed, **fields)
        finally:
            self._num_running -= 1
        outputs = [make_sample(index, sample) for index, sample in enumerate(result.samples)]
        yield RequestOutput(request_id, None, ids, None, outputs, True, result.cached_tokens)

    async def pause_generation(self, mode: Any = "abort") -> None:
        await self._engine.trainer.pause(mode)

    async def resume_generation(self) -> None:
        await self._engine.trainer.resume()

    async def reset_prefix_cache(self) -> None:
        await self._engine.trainer.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        if not await self.is_sleeping():
            await self._engine.trainer.sleep(level)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Weights are there always: waking them alone changes nothing."""
        if "kv_cache" in tags:
            await self._engine.trainer.wake()
            await self._engine.trainer.resume()

    async def stop(self) -> None:
        await self._engine.stop()

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        """OpenRLHF's extension of vLLM's workers. Raises CommandError, which names the tensor at fault."""
        calls: dict[str, Callable[..., Any]] = {
            "init_process_group": self._open,
            "update_weight": self._update,
            "update_weight_cuda_ipc": self._update_shared,
        }
        await calls[method](*args)

    async def _open(
        self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str, use_ray: bool
    ) -> None:
        if use_ray:
            raise ValueError("toka: leave --vllm.sync_with_ray out")
        self._group = name
        where: dict[str, Any] = {"address": address, "port": port, "rank_offset": rank_offset, "world_size": world_size}
        is_gloo = backend == "gloo"
        transfer = GroupTransfer(name=name, **where, backend="gloo") if is_gloo else NcclTransfer(name=name, **where)
        await self._engine.trainer.open_transfer(transfer)

    async def _update(self, name: str, dtype: torch.dtype, shape: Sequence[int], is_last: bool) -> None:
        await self._load(Broadcast(transfer=self._group), TensorInfo(name, dtype, tuple(shape)), is_last)

    async def _update_shared(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], handles: Mapping[str, Any], is_last: bool
    ) -> None:
        found = [read_handle(gpu, args) for gpu, (_, args) in handles.items()]
        (offset,) = {offset for _, offset in found}
        bucket = CudaBucket(handles=tuple(handle for handle, _ in found), offsets=(offset,))
        await self._load(bucket, TensorInfo(name, dtype, tuple(shape)), is_last)

    async def _load(self, source: Source, info: TensorInfo, is_last: bool) -> None:
        """Load a tensor: an update begins with the first one after the last."""
        trainer = self._engine.trainer
        if not self._is_updating:
            await trainer.begin_update()
            self._is_updating = True
        try:
            await trainer.load(source, [info])
            if is_last:
                await trainer.finish_update()
                self._is_updating = False
        except BaseException:
            self._is_updating = False  # the engine has given it up
            raise


@dataclass(frozen=True, slots=True)
class StatelessGroup:
    """Where the ends of a communicator meet."""

    host: str
    port: int
    rank: int
    world_size: int

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> Self:
        return cls(host, port, rank, world_size)


class TrainerEnd:
    """The trainer's end of a communicator: NCCL, or on a CPU a group of gloo."""

    def __init__(self, group: StatelessGroup, device: torch.device | int) -> None:
        where: dict[str, Any] = {
            "address": group.host,
            "port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
        }
        place, deadline = torch.device(device), Deadline(TIMEOUT)
        if place.type == "cpu":
            meeting = GroupTransfer(**where, name="openrlhf", backend="gloo")
            self._end: Any = join_torch_group(meeting, group.rank, place, deadline)
        else:
            self._end = join_nccl(NcclTransfer(**where), group.rank, place, deadline)

    def broadcast(self, tensor: Tensor, src: int = 0, stream: Any = None) -> None:  # noqa: ARG002
        """From this end. It waits for the current stream, which OpenRLHF names too."""
        assert src == 0
        self._end.broadcast(tensor, Deadline(TIMEOUT))


def make_sample(index: int, sample: Sample) -> CompletionOutput:
    """Make vLLM's output of a sample: log-probs of each token, itself and the likeliest."""
    ids = sample.token_ids.tolist()
    logprobs = [{token: Logprob(value)} for token, value in zip(ids, sample.logprobs.tolist(), strict=False)]
    if sample.top_ids.size:
        for entry, *tops in zip(logprobs, sample.top_ids.tolist(), sample.top_logprobs.tolist(), strict=True):
            for rank, (token, value) in enumerate(zip(*tops, strict=True), start=1):
                entry[token] = Logprob(value, rank)
    total = float(sample.logprobs.sum(dtype="float64")) if logprobs else None
    return CompletionOutput(
        index, sample.text, ids, total, logprobs or None, sample.finish_reason, stop_reason=sample.stop
    )


def read_handle(gpu: str, args: Sequence[Any]) -> tuple[CudaHandle, int]:
    """Read what torch's `reduce_tensor` made of a tensor: the memory that it is in, and where in bytes."""
    _, _, _, start, _, dtype, _, handle, size, offset, _, counter, counter_offset, event, waits = args
    shared = CudaHandle(
        gpu=gpu,
        handle=handle,
        size=size,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        waits=waits,
    )
    return shared, start * dtype.itemsize


def hold_gpus() -> list[Any]:
    """Hold the GPUs of an engine of several: those of its bundles in the actor's placement group."""
    share, group = float(os.environ["VLLM_RAY_PER_WORKER_GPUS"]), ray.util.get_current_placement_group()
    assert group is not None  # OpenRLHF makes one
    return [
        ray.remote(GpuHolder)
        .options(
            num_cpus=0,
            num_gpus=share,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=int(index)),
        )
        .remote()
        for index in os.environ["VLLM_RAY_BUNDLE_INDICES"].split(",")
    ]


def find_gpus(holders: Sequence[Any]) -> list[str]:
    """Find the ids of held GPUs. Raises ValueError where they are not on this node."""
    places = ray.get([holder.find_place.remote() for holder in holders])
    if {node for node, _ in places} - {ray.get_runtime_context().get_node_id()}:
        raise ValueError("toka: an engine has the GPUs of one node; lower --vllm.tensor_parallel_size")
    return [gpu for _, gpu in places]


class GpuHolder:
    """An actor that has a GPU for an engine which is no actor of Ray's."""

    def find_place(self) -> tuple[str, str]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


def install() -> None:
    """Put what OpenRLHF imports from vLLM into this process."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {
            "__version__": STANDS_FOR,
            "SamplingParams": SamplingParams,
            "AsyncEngineArgs": dict,
            "AsyncLLMEngine": RolloutEngine,
        },
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.utils": {"random_uuid": lambda: os.urandom(16).hex()},
        "vllm.distributed": {},
        "vllm.distributed.utils": {"StatelessProcessGroup": StatelessGroup},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": TrainerEnd},
    }
    for name, values in names.items():
        module = ModuleType(name, f"Names of vLLM's in {__name__}.")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(module).update(values)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def main() -> None:
    """Start Ray as OpenRLHF does, with `install` in all of its processes, and run its trainer."""
    options = {name: os.environ[name] for name in ("TOKA_OPTIONS",) if name in os.environ}
    environment = {
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": os.environ.get("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1"),
        **options,
    }
    hook = "toka_async.integrations.openrlhf.install"
    ray.init(runtime_env={"worker_process_setup_hook": hook, "env_vars": environment})
    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
