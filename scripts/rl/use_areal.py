"""AReaL 1.0.4's RemoteSGLangEngine generates, while a second client pauses, updates and continues every second.

toka-async serve server.admin=true &
PYTHONPATH=path/to/AReaL python scripts/rl/use_areal.py http://127.0.0.1:10210 toka_async/demo
"""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

import requests
from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from transformers import AutoTokenizer

SECONDS = 12.0


def update_for_ever(url: str, model: str, stop: threading.Event, updates: list[int]) -> None:
    """The second client: what AReaL's trainer sends for weights on a disk."""
    steps: tuple[tuple[str, dict[str, Any]], ...] = (
        ("pause_generation", {}),
        ("update_weights_from_disk", {"model_path": model, "abort_all_requests": True}),
        ("continue_generation", {}),
    )
    while not stop.wait(1.0):
        for path, body in steps:
            requests.post(f"{url}/{path}", json=body, timeout=60).raise_for_status()
        updates.append(1)


async def main(url: str, model: str) -> None:
    config = InferenceEngineConfig(
        backend="sglang:d1", experiment_name="e", trial_name="t", max_concurrent_rollouts=16, request_timeout=60
    )
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=urlsplit(url).netloc)
    tokenizer = AutoTokenizer.from_pretrained(model)
    stop, updates = threading.Event(), list[int]()
    thread = threading.Thread(target=update_for_ever, args=(url, model, stop, updates))
    sampling = GenerationHyperparameters(n_samples=1, max_new_tokens=400, temperature=0.0, greedy=True)
    asked = [ModelRequest(input_ids=[5, 6, number], gconfig=sampling, tokenizer=tokenizer) for number in range(10, 26)]
    plain = await asyncio.gather(*map(engine.agenerate, asked))
    thread.start()
    loop, num_samples = asyncio.get_running_loop(), 0
    ends = loop.time() + SECONDS
    while loop.time() < ends:
        asked = [
            ModelRequest(input_ids=[5, 6, number], gconfig=sampling, tokenizer=tokenizer) for number in range(10, 26)
        ]
        for before, now in zip(plain, await asyncio.gather(*map(engine.agenerate, asked)), strict=True):
            assert now.output_tokens == before.output_tokens, "the same weights give the same tokens, aborted or not"
            assert len(now.output_logprobs) == len(now.output_tokens)
            num_samples += 1
    stop.set()
    thread.join()
    engine.destroy()
    print(f"areal: {num_samples} samples during {len(updates)} updates, all as without updates")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
