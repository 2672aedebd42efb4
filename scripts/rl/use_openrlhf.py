"""OpenRLHF 0.11.2's actors of engines and its executors on Ray, unmodified, with engines of ours in them.

    TOKA_OPTIONS="model.device=cpu model.dtype=float32" python scripts/rl/use_openrlhf.py toka_async/demo

Without a GPU: Ray is told of two, and the trainer's end of the communicator is a group of gloo. Its trainer itself
needs DeepSpeed; the loop that sends weights is that of `ppo_actor.py`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from toka_async.integrations.openrlhf import install

PROMPTS = [f"Question: what is {number} + 4?" for number in range(8)]
ADDRESS, PORT = "127.0.0.1", 29611


def main(model: str) -> None:
    hook = "toka_async.integrations.openrlhf.install"
    environment = {"TOKA_OPTIONS": os.environ["TOKA_OPTIONS"]}
    ray.init(
        address="local",
        num_cpus=24,
        num_gpus=2,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": hook, "env_vars": environment},
    )
    install()
    from openrlhf.trainer.ray import batch_vllm_engine_call, create_vllm_engines
    from openrlhf.utils.distributed_util import stateless_init_process_group
    from vllm import SamplingParams

    engines = create_vllm_engines(
        2, 1, model, 1, False, True, True, 1024, None, 0.5, vllm_enable_sleep=True, logprobs_mode="processed_logprobs"
    )
    tokenizer = AutoTokenizer.from_pretrained(model)

    def roll_out() -> list[Any]:
        greedy = SamplingParams(temperature=0.0, max_tokens=300, min_tokens=1, skip_special_tokens=False, logprobs=1)
        return [
            engines[number % 2].generate_responses.remote(
                prompt=prompt,
                label="",
                sampling_params=greedy,
                max_length=512,
                hf_tokenizer=tokenizer,
                num_samples=2,
            )
            for number, prompt in enumerate(PROMPTS)
        ]

    batch_vllm_engine_call(engines, "wake_up")
    plain = ray.get(roll_out())
    for response in (each for group in plain for each in group):
        ((start, end),) = response["action_ranges"]
        assert len(response["rollout_log_probs"]) == len(response["observation_tokens"]) == end
        assert any(response["rollout_log_probs"][start:end])
    running = roll_out()
    while not sum(ray.get([engine.get_num_unfinished_requests.remote() for engine in engines])):
        time.sleep(0.02)
    batch_vllm_engine_call(engines, "pause_generation")
    batch_vllm_engine_call(engines, "resume_generation")
    assert [[each["observation_tokens"] for each in group] for group in ray.get(running)] == [
        [each["observation_tokens"] for each in group] for group in plain
    ]
    print(f"openrlhf: {2 * len(PROMPTS)} rollouts were paused, went on, and are the same")
    batch_vllm_engine_call(engines, "sleep")

    joining = [
        engine.init_process_group.remote(ADDRESS, PORT, place + 1, 3, "openrlhf", backend="gloo", use_ray=False)
        for place, engine in enumerate(engines)
    ]
    group = stateless_init_process_group(ADDRESS, PORT, 0, 3, torch.device("cpu"))
    ray.get(joining)
    tensors = load_file(Path(model) / "model.safetensors")
    batch_vllm_engine_call(engines, "wake_up", tags=["weights"])
    resets = [engine.reset_prefix_cache.remote() for engine in engines]
    for count, (name, tensor) in enumerate(tensors.items(), start=1):
        tensor += 0.02 * torch.randn(tensor.shape) * tensor.std()
        updates = [
            engine.update_weight.remote(name, dtype=tensor.dtype, shape=tensor.shape, empty_cache=count == len(tensors))
            for engine in engines
        ]
        group.broadcast(tensor, src=0, stream=None)
        ray.get(updates)
    ray.get(resets)
    batch_vllm_engine_call(engines, "wake_up")
    changed = ray.get(roll_out())
    assert [group[0]["observation_tokens"] for group in changed] != [group[0]["observation_tokens"] for group in plain]
    assert all(group[0]["observation_tokens"] == group[1]["observation_tokens"] for group in changed)
    print(f"openrlhf: {len(tensors)} tensors were sent to 2 engines; rollouts are of the new weights")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
