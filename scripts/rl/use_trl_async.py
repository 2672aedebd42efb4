"""TRL 1.16's asynchronous GRPO against a running server, unmodified: rollouts of its worker, during an update by its
client.

    toka-async serve server.admin=true model.logprobs_mode=processed &
    python scripts/rl/use_trl_async.py http://127.0.0.1:10210 toka_async/demo

Its own transfer is NCCL; here the tensors go through shared memory, as with `TrlWeightTransfer`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
from accelerate import PartialState
from safetensors.torch import load_file

from toka_async.transfer.buckets import ShmWriter

PROMPTS = [[5, 6, number] for number in range(10, 26)]


def update(client: Any, model: str) -> None:
    """What `AsyncGRPOTrainer` asks of its client, in its order."""
    tensors = load_file(Path(model) / "model.safetensors")
    writer = ShmWriter("toka-use-trl-async", 1 << 26)
    try:
        client.pause()
        client.start_weight_update()
        for infos, bucket in writer.fill(tensors.items()):
            client.update_weights(
                {
                    "names": [each.name for each in infos],
                    "dtype_names": [str(each.dtype).removeprefix("torch.") for each in infos],
                    "shapes": [list(each.shape) for each in infos],
                    "shm": {"name": writer.name, "offsets": list(getattr(bucket, "offsets", ()))},
                }
            )
        client.finish_weight_update()
        client.resume()
    finally:
        writer.close()


async def main(url: str, model: str) -> None:
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState(cpu=True)  # TRL's log needs it
    client = VLLMClient(url)
    client.wait_for_server_ready()
    print("world size:", client.get_world_size(), client.get_dtype(), client.get_max_model_len())
    assert client.get_server_info()["weight_transfer_config"]
    worker = _AsyncRolloutLoop.__new__(_AsyncRolloutLoop)
    given = {"max_tokens": 800, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": None}
    vars(worker).update(given, request_timeout=120, vllm_server_url=url, _counters=defaultdict(int))
    async with aiohttp.ClientSession() as session:
        vars(worker)["session"] = session
        async with session.get(f"{url}/v1/models") as response:
            name = (await response.json())["data"][0]["id"]
        vars(worker).update(model_name=name, lora_name=None)
        turns = [asyncio.create_task(worker._generate_one_turn(prompt)) for prompt in PROMPTS]
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        await asyncio.to_thread(update, client, model)
        seconds = time.perf_counter() - began
        for ids, logprobs in await asyncio.gather(*turns):
            assert len(ids) == len(logprobs) > 0
            assert all(value <= 0 for value in logprobs)
    print(f"trl: {len(PROMPTS)} rollouts, with an update of {seconds:.2f} s in the middle")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
