"""slime's and miles' own clients against a running server: rollouts, aborts, and weights from rank 0 of a group.

    toka-async serve server.admin=true &
    PYTHONPATH=path/to/slime python scripts/rl/use_slime.py http://127.0.0.1:10210 toka_async/demo slime
    PYTHONPATH=path/to/miles python scripts/rl/use_slime.py http://127.0.0.1:10210 toka_async/demo miles

Empty classes stand in for the names that these import from SGLang and Megatron, which are not installed. The order of
an update is that of `update_weight_from_distributed.py`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from stubs import stand_in_for

PORT = 29612


def make_args(url: str, model: str) -> Any:
    parts = urlsplit(url)
    return SimpleNamespace(
        hf_checkpoint=model,
        sglang_router_ip=parts.hostname,
        sglang_router_port=parts.port,
        sglang_server_concurrency=64,
        sglang_dp_size=1,
        sglang_speculative_algorithm=None,
        rollout_num_engines=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        eval_num_gpus=0,
        sglang_router_policy=None,
        chat_template_path=None,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=300,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        rollout_seed=1,
        n_samples_per_prompt=4,
        use_distributed_post=False,
        use_rollout_routing_replay=False,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=False,
        ci_test=False,
        use_opd=False,
        rollout_external=True,
        lora_rank=0,
        lora_adapter_path=None,
    )


async def roll_out(package: str, args: Any) -> None:
    """Samples of a group, ended in the middle as slime does, and gone on with."""
    rollout = import_module(f"{package}.rollout.sglang_rollout")
    samples = import_module(f"{package}.utils.types")
    import_module(f"{package}.utils.http_utils").init_http_client(args)
    state = rollout.GenerateState(args)
    group = [samples.Sample(prompt=f"Question: what is {number} + 4?", index=number) for number in range(8)]
    tasks = [asyncio.create_task(rollout.generate(args, each, state.sampling_params.copy())) for each in group]
    await asyncio.sleep(0.3)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    if package == "slime":
        await import_module("slime.backends.sglang_utils.server_control").abort_server_until_idle(url)
    else:
        await rollout.post(f"{url}/abort_request", {"abort_all": True})
    done = await asyncio.gather(*tasks)
    print("aborted:", [(each.status.value, each.response_length) for each in done])
    assert any(each.status == samples.Sample.Status.ABORTED for each in done)
    for each in done:
        if each.status == samples.Sample.Status.ABORTED:
            await rollout.generate(args, each, state.sampling_params.copy())
    assert all(each.status.value in ("completed", "truncated") for each in done)
    assert all(len(each.rollout_log_probs) == each.response_length > 0 for each in done)
    print("gone on with:", [(each.status.value, each.response_length) for each in done])


def update(package: str, args: Any) -> None:
    """All weights from rank 0 of a group of torch.distributed."""
    engine = import_module(f"{package}.backends.sglang_utils.sglang_engine").SGLangEngine(args, 0)
    engine.node_rank, engine.server_host, engine.server_port = 0, args.sglang_router_ip, args.sglang_router_port
    init_process_group = import_module(f"{package}.utils.distributed_utils").init_process_group
    assert engine.health_generate()
    joining = threading.Thread(
        target=engine.init_weights_update_group, args=("127.0.0.1", PORT, 1, 2, "slime-pp_0", "gloo")
    )
    joining.start()
    group = init_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{PORT}", world_size=2, rank=0, group_name="slime-pp_0"
    )
    joining.join()
    for version in ("1", "2"):
        tensors = {
            name: each + 0.01 for name, each in load_file(Path(args.hf_checkpoint) / "model.safetensors").items()
        }
        engine.pause_generation()
        engine.flush_cache()
        if package == "miles":
            engine.begin_weight_update()
        names = list(tensors)
        for chunk in (names[:9], names[9:]):
            told = threading.Thread(
                target=engine.update_weights_from_distributed,
                args=(chunk, [tensors[name].dtype for name in chunk], [tensors[name].shape for name in chunk]),
                kwargs={"group_name": "slime-pp_0", "weight_version": version},
            )
            told.start()
            for name in chunk:
                dist.broadcast(tensors[name], 0, group=group)
            told.join()
        if package == "miles":
            engine.end_weight_update()
            engine.update_weight_version(version)
        engine.continue_generation()
        assert engine.get_weight_version() == version
    print("updates: the version is", engine.get_weight_version())
    for tags in (None, ["weights"], ["kv_cache"]):
        engine.release_memory_occupation() if tags is None else engine.resume_memory_occupation(tags=tags)
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert engine.check_weights("checksum")["ranks"]
    engine.update_weights_from_disk(str(Path(args.hf_checkpoint).resolve()), weight_version="3")
    assert engine.get_weight_version() == "3"
    engine.destroy_weights_update_group("slime-pp_0")


async def score(package: str, args: Any) -> None:
    """A teacher's log-probs, by slime's reward function."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    distillation = import_module(f"{package}.rollout.on_policy_distillation")
    sample = SimpleNamespace(tokens=[5, 6, 7, 8], multimodal_inputs=None, response_length=2, metadata={}, reward=None)
    args.rm_url = url
    answer = await distillation.reward_func(args, sample)
    assert len(answer["meta_info"]["input_token_logprobs"]) == 4
    print("teacher:", answer["meta_info"]["input_token_logprobs"])


def main(url: str, model: str, package: str) -> None:
    stand_in_for("sglang", "sglang_router", "megatron")
    torch.manual_seed(0)
    args = make_args(url, model)
    asyncio.run(roll_out(package, args))
    if package == "slime":
        import_module("slime.backends.sglang_utils.external").discover_external_engines([urlsplit(url).netloc])
        asyncio.run(score(package, args))
    update(package, args)
    print(f"{package}: done")


if __name__ == "__main__":
    main(*sys.argv[1:4])
