"""The adapters of verl and OpenRLHF with a running engine; scripts/rl runs them in the trainers themselves.

A few classes stand in for verl, which is not installed. Actors are called without Ray.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.models import heads, make_checkpoint
from tests.drivers.weight_updates import read_checkpoint
from tests.processes.serving import free_port, serving
from toka_async.client import Client, CommandError, Trainer
from toka_async.control import CudaBucket
from toka_async.integrations import openrlhf
from toka_async.llm.engine_options import make_config
from toka_async.llm.sampling_params import SamplingParams
from toka_async.transfer.checksum import sum_tensors

SHAPE: dict[str, Any] = heads(4, 2, 48, num_hidden_layers=2)
PROMPT = [3, 4, 5]


class Mode(Enum):
    HYBRID = "hybrid"
    COLOCATED = "colocated"
    STANDALONE = "standalone"


@dataclass
class Output:
    """verl's TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Rollout:
    def __init__(self, config: Any, _model_config: Any, _device_mesh: Any) -> None:
        self.config = config


async def iterate(pairs: Iterable[Any]) -> AsyncIterator[Any]:
    for pair in pairs:
        yield pair


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter, with the names that it imports from verl."""
    registry: dict[Any, Any] = {}
    names: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.utils": {},
        "verl.utils.config": {"omega_conf_to_dataclass": lambda config, **_: config},
        "verl.utils.device": {"get_resource_name": lambda: "GPU"},
        "verl.workers": {},
        "verl.workers.config": {"HFModelConfig": object},
        "verl.workers.rollout": {},
        "verl.workers.rollout.base": {"_ROLLOUT_REGISTRY": registry, "BaseRollout": Rollout},
        "verl.workers.rollout.replica": {
            "RolloutMode": Mode,
            "RolloutReplica": object,
            "RolloutReplicaRegistry": SimpleNamespace(register=registry.__setitem__),
            "TokenOutput": Output,
        },
        "verl.workers.rollout.utils": {"ensure_async_iterator": iterate},
    }
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    adapter = importlib.import_module("toka_async.integrations.verl")
    assert registry["toka"]() is adapter.TokaReplica
    assert registry["toka", "async"] == "toka_async.integrations.verl.TokaRollout"
    yield adapter
    del sys.modules["toka_async.integrations.verl"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder, url = tmp_path_factory.mktemp("adapters"), f"tcp://127.0.0.1:{free_port()}"
    make_checkpoint(folder, "qwen3", seed=0, **SHAPE)
    overrides = ("server.admin=true", "model.device=cpu", f"zmq.bind={url}", "limits.max_logprobs=-1")
    with serving(folder, f"model.path={folder}", *overrides):
        yield url, folder


@asynccontextmanager
async def hosted(served: tuple[str, Path], adapter: Any, patch: pytest.MonkeyPatch) -> AsyncIterator[list[Any]]:
    """Gives the adapter the running engine in place of one that it starts; yields the options that it asked for.

    Afterwards the engine has its first weights.
    """
    url, folder = served
    asked: list[Any] = []
    async with Client(url) as client:
        assert client.welcome is not None
        engine = SimpleNamespace(
            client=client, trainer=Trainer(client), url="http://127.0.0.1:5", max_context=client.welcome.max_context
        )
        engine.start = lambda: asyncio.sleep(0)

        def host(*args: Any) -> Any:
            asked.append(args)
            return engine

        patch.setattr(adapter, "HostedEngine", host)
        yield asked
        await engine.trainer.update_from(folder, "default")
        await engine.trainer.resume()


def change(folder: Path) -> dict[str, Tensor]:
    return {name: tensor + 0.5 for name, tensor in read_checkpoint(folder).items()}


def verl_config(**values: Any) -> Any:
    config: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_parallel_size": 1,
        "dtype": "float32",
        "load_format": "dummy",
        "quantization": None,
        "quantization_config_file": None,
        "max_model_len": None,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": False,
        "enable_sleep_mode": True,
        "free_cache_engine": True,
        "logprobs_mode": "processed_logprobs",
        "full_determinism": False,
        "seed": 42,
        "prompt_length": 16,
        "response_length": 64,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "disaggregation": SimpleNamespace(enabled=False),
        "mtp": None,
        "profiler": None,
        "qat": None,
        "enable_rollout_routing_replay": False,
        "prometheus": SimpleNamespace(served_model_name=None),
        "engine_kwargs": {"toka": {"cache": {"num_tokens": 4096}}},
        "checkpoint_engine": SimpleNamespace(update_weights_bucket_megabytes=1),
    }
    return SimpleNamespace(**config | values)


MODEL = SimpleNamespace(local_path="demo", lora_rank=0, lora={})
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "ignore_eos": True}


class Called:
    """An actor's handle: calls go to an object of this process."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target, name))


async def test_verl_aborts_updates_and_goes_on(
    verl: Any, served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    async with hosted(served, verl, monkeypatch) as asked:
        server = verl.VerlServer(verl_config(), MODEL, Mode.STANDALONE, 0, ["0"])
        assert await server.launch_server() == ("127.0.0.1", 5)
        made = make_config(asked[0][0], None, asked[0][1])
        assert (made.model.load, made.cache.num_tokens) == ("random", 4096)
        assert (made.model.logprobs_mode, made.schedule.max_seqs) == ("processed", 16)
        whole = await server.generate(PROMPT, GREEDY, "a")
        assert (len(whole.token_ids), len(whole.log_probs), whole.stop_reason) == (64, 64, "completed")

        running = asyncio.create_task(server.generate(PROMPT, GREEDY | {"max_tokens": 400}, "b"))
        await asyncio.sleep(0.1)
        await server.abort_all_requests()
        part = await running
        assert part.stop_reason == "aborted"
        assert len(part.token_ids) == len(part.log_probs) < 400
        await server.release_kv_cache()
        rollout = verl.TokaRollout(verl_config(), None, None)
        rollout._found = Called(server)
        tensors = change(served[1])
        await rollout.update_weights(iter(tensors.items()), global_steps=7)
        assert await server.checksum() == sum_tensors(tensors)
        waiting = asyncio.create_task(server.generate(PROMPT, GREEDY, "c"))
        await server.resume_kv_cache()
        assert not waiting.done()
        await server.resume_generation()
        new = await waiting
        assert new.extra_fields == {
            **dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 7),
            "num_cached_tokens": 0,
        }
        assert new.token_ids != whole.token_ids

        name = next(iter(tensors))
        with pytest.raises(CommandError, match=f"{name} has shape"):
            await rollout.update_weights(iter([(name, torch.zeros(2))]))
        await rollout.update_weights(iter(tensors.items()), global_steps=8)
        await server.resume_generation()
        await server.abort_all_requests(reject_request=True)
        assert (await server.generate(PROMPT, GREEDY, "d")).stop_reason == "aborted"
        await server.resume_generation()


async def test_verls_trainer_gets_the_memory_and_prompts_are_scored(
    verl: Any, served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    async with hosted(served, verl, monkeypatch):
        server = verl.VerlServer(verl_config(), MODEL, Mode.HYBRID, 0, [])
        rollout = verl.TokaRollout(verl_config(), None, None)
        rollout._found = Called(server)
        await rollout.release()
        await rollout.release()  # it sleeps already
        waiting = asyncio.create_task(server.generate(PROMPT, {"max_new_tokens": 2, "prompt_logprobs": 2}, "a"))
        await rollout.resume(["weights"])
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await rollout.resume(["kv_cache"])
        scored = await waiting
        assert len(scored.token_ids) == 2
        assert scored.log_probs is None
        assert [len(each) for each in scored.extra_fields["prompt_logprobs"]] == [2, 2, 2]
        assert scored.extra_fields["prompt_ids"][-1] == [0, 0]
        own = await server.generate(PROMPT, {"max_tokens": 1, "prompt_logprobs": 0}, "b")
        assert own.extra_fields["prompt_ids"] == [[4], [5], [0]]
        with pytest.raises(ValueError, match="leaves no room"):
            await server.generate([1] * 5000, {}, "c")
        with pytest.raises(ValueError, match="images"):
            await server.generate(PROMPT, {}, "d", image_data=[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable_rollout_routing_replay": True}, "rollout.enable_rollout_routing_replay"),
        ({"profiler": SimpleNamespace(enable=True)}, "rollout.profiler.enable"),
        ({"disaggregation": SimpleNamespace(enabled=True)}, "rollout.disaggregation"),
    ],
)
def test_what_verl_wants_and_cannot_have_is_named(verl: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verl.make_options(verl_config(**values))


def test_ranks_of_verl_share_their_gpus_as_one_bucket(verl: Any) -> None:
    handles = [openrlhf.read_handle(f"GPU-{rank}", make_reduced(0))[0] for rank in range(2)]
    parts = [CudaBucket(handles=(handle,), offsets=(0, 16)) for handle in handles]
    assert verl.join_parts(parts) == CudaBucket(handles=tuple(handles), offsets=(0, 16))


def make_reduced(start: int) -> tuple[Any, ...]:
    """What torch's `reduce_tensor` returns as arguments."""
    kind = (torch.Tensor, (2, 2), (2, 1), start, torch.UntypedStorage, torch.bfloat16, 0)
    return (*kind, b"handle", 64, 32, False, b"counter", 3, b"event", True)


async def test_openrlhfs_engine_samples_sleeps_and_is_updated(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_OPTIONS", "cache.num_tokens=4096 model.device=cpu")
    asked_of_vllm = {
        "model": "demo",
        "enforce_eager": True,
        "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        "tensor_parallel_size": 1,
        "seed": 1,
        "distributed_executor_backend": "uni",
        "max_model_len": 512,
        "enable_prefix_caching": True,
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "gpu_memory_utilization": 0.5,
        "enable_sleep_mode": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
    }
    async with hosted(served, openrlhf, monkeypatch) as asked:
        engine = openrlhf.RolloutEngine.from_engine_args(asked_of_vllm)
        made = make_config(asked[0][0], None, asked[0][1])
        assert (made.model.max_context, made.graphs.enabled, made.cache.num_tokens) == (512, False, 4096)
        assert not await engine.is_sleeping()
        greedy = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, ignore_eos=True)
        await engine.pause_generation(mode="keep")
        running = asyncio.ensure_future(anext(engine.generate({"prompt_token_ids": PROMPT}, greedy, "a")))
        await asyncio.sleep(0.05)
        assert engine.output_processor.get_num_unfinished_requests() == 1
        await engine.resume_generation()
        (sample,) = (await running).outputs
        assert len(sample.token_ids) == 40
        assert sample.finish_reason == "length"
        assert sample.text
        assert sample.logprobs is not None
        assert all(entry[token].rank == 1 for entry, token in zip(sample.logprobs, sample.token_ids, strict=True))

        await engine.sleep()
        await engine.sleep()
        await engine.wake_up(tags=["weights"])
        assert await engine.is_sleeping()
        tensors, port = change(served[1]), free_port()
        joining = asyncio.ensure_future(
            engine.collective_rpc("init_process_group", ("127.0.0.1", port, 1, 2, "openrlhf", "gloo", False))
        )
        meeting = openrlhf.StatelessGroup.create(host="127.0.0.1", port=port, rank=0, world_size=2)
        trainer = await asyncio.to_thread(openrlhf.TrainerEnd, meeting, torch.device("cpu"))
        await joining
        for count, (name, tensor) in enumerate(tensors.items(), start=1):
            told = (name, tensor.dtype, tensor.shape, count == len(tensors))
            update = asyncio.ensure_future(engine.collective_rpc("update_weight", told))
            await asyncio.to_thread(trainer.broadcast, tensor, 0)
            await update
        await engine.reset_prefix_cache()
        await engine.wake_up(tags=["kv_cache"])
        assert await engine._engine.trainer.checksum() == sum_tensors(tensors)
        with pytest.raises(ValueError, match="sync_with_ray"):
            await engine.collective_rpc("init_process_group", ("127.0.0.1", port, 1, 2, "g", "gloo", True))


def test_openrlhf_finds_our_names_where_vllms_would_be() -> None:
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    openrlhf.install()
    try:
        assert importlib.import_module("vllm").AsyncLLMEngine is openrlhf.RolloutEngine
        assert importlib.util.find_spec("vllm") is not None
        pynccl = importlib.import_module("vllm.distributed.device_communicators.pynccl")
        assert pynccl.PyNcclCommunicator is openrlhf.TrainerEnd
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(kept)


def test_memory_of_gpus_is_shared_as_torch_describes_it() -> None:
    handle, offset = openrlhf.read_handle("GPU-1", make_reduced(4))
    assert (handle.gpu, handle.handle, handle.size, handle.offset, offset) == ("GPU-1", b"handle", 64, 32, 8)
    assert (handle.counter, handle.counter_offset, handle.event, handle.waits) == (b"counter", 3, b"event", True)
