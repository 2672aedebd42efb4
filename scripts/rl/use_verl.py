"""verl 0.9.1's servers, clients and update of weights on Ray, unmodified, with an engine of ours as the replica.

    VERL_USE_EXTERNAL_MODULES=toka_async.integrations.verl python scripts/rl/use_verl.py toka_async/demo

Without a GPU: Ray is told of one, and the weights go from verl's trainer to its rollout workers through a file, by a
checkpoint engine that is registered here; from there to the engine they go as always. Rollouts are aborted in the
middle, by hand and by an update, and go on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

from toka_async.transfer.checksum import sum_tensors

FILE = Path("/dev/shm/toka-use-verl.safetensors")
PROMPTS = [[5, 6, number] for number in range(10, 26)]
LENGTH = 400
OPTIONS = [
    *(
        f"actor_rollout_ref.rollout.{each}"
        for each in (
            "name=toka",
            "nnodes=1",
            "n_gpus_per_node=1",
            "tensor_model_parallel_size=1",
            "prompt_length=64",
            f"response_length={LENGTH}",
            "dtype=float32",
            "load_format=safetensors",
            "max_num_seqs=64",
            "max_num_batched_tokens=2048",
            "enforce_eager=true",
            "checkpoint_engine.backend=file",
            "checkpoint_engine.custom_backend_module=use_verl",
            "checkpoint_engine.update_weights_bucket_megabytes=4",
        )
    ),
    "+actor_rollout_ref.rollout.engine_kwargs.toka.device=cpu",
]


@CheckpointEngineRegistry.register("file")
class FileEngine(CheckpointEngine):  # type: ignore[misc]
    def __init__(self, bucket_size: int, **_: Any) -> None:
        self.bucket_size = bucket_size

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, _: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"rank": list(range(actors))}, {"rank": list(range(rollouts))}

    def init_process_group(self, rank: int) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Any, **_: Any) -> None:
        save_file(dict(weights), FILE)

    async def receive_weights(self, **_: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while not FILE.exists():
            await asyncio.sleep(0.05)
        for name, tensor in load_file(FILE).items():
            yield name, tensor


class Actor(Worker):  # type: ignore[misc]
    """Of verl's worker of a trainer, what an update of weights needs. Each update moves the weights a bit."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._tensors = load_file(Path(model) / "model.safetensors")
        self._engine = FileEngine(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int = 0, **_: Any) -> None:
        generator = torch.Generator().manual_seed(global_steps)
        for tensor in self._tensors.values():
            tensor += 0.02 * torch.randn(tensor.shape, generator=generator) * tensor.std()
        save_file(self._tensors, FILE.with_suffix(".new"))
        FILE.with_suffix(".new").rename(FILE)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._engine, method)(*args, **kwargs)


async def main(model: str) -> None:
    FILE.unlink(missing_ok=True)
    ray.init(address="local", num_cpus=24, num_gpus=2, include_dashboard=False)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*OPTIONS, f"actor_rollout_ref.model.path={model}"])
    manager = await LLMServerManager.create(config)
    client = manager.get_client(FullyAsyncLLMServerClient)
    actors = RayWorkerGroup(
        RayResourcePool([1], use_gpu=True), RayClassWithInitArgs(cls=ray.remote(Actor), model=model)
    )
    updates = CheckpointEngineManager(
        config.actor_rollout_ref.rollout.checkpoint_engine, actors, manager.get_replicas()
    )
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True}

    async def roll_out() -> list[Any]:
        asked = (client.generate(str(ids), prompt_ids=ids, sampling_params=sampling) for ids in PROMPTS)
        return await asyncio.gather(*asked)

    plain = await roll_out()
    assert all(len(each.log_probs) == len(each.token_ids) > 0 for each in plain)
    running = asyncio.create_task(roll_out())
    await asyncio.sleep(0.7)
    assert not running.done()
    await updates.abort_replicas()
    await updates.resume_generation_replicas()
    assert [each.token_ids for each in await running] == [each.token_ids for each in plain]
    print(f"verl: {len(plain)} rollouts were aborted, went on, and are the same")

    running = asyncio.create_task(roll_out())
    await asyncio.sleep(0.7)
    await updates.update_weights(global_steps=1)  # aborts, gives the cache's memory back, sends, takes it, goes on
    spans = [(each.extra_fields["min_global_steps"], each.extra_fields["max_global_steps"]) for each in await running]
    assert any(newest == 1 for _, newest in spans), spans
    (replica,) = manager.get_replicas()
    sent = {name: tensor.float() for name, tensor in load_file(FILE).items()}  # as the engine has them
    assert await replica.server_handle.checksum.remote() == sum_tensors(sent)
    again = await roll_out()
    assert {each.extra_fields["global_steps"] for each in again} == {1}
    assert [each.token_ids for each in again] != [each.token_ids for each in plain]
    print(f"verl: an update in the middle of {len(spans)} rollouts; the engine has the trainer's weights")
    ray.shutdown()
    FILE.unlink()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
