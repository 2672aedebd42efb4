from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import random_tokens
from toka_async.integrations.trl import TrlRollout, TrlWeightTransfer


class ByteTokenizer:
    """As much of a tokenizer of transformers as a rollout uses."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<{messages[-1]['content']}>"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def make_trainer() -> Any:
    args = SimpleNamespace(
        max_completion_length=4, temperature=0.5, top_p=1.0, top_k=None, min_p=None, repetition_penalty=1.0
    )
    return SimpleNamespace(
        args=args,
        model=torch.nn.Linear(2, 2),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        processing_class=ByteTokenizer(),
        state=SimpleNamespace(global_step=0),
    )


async def version(server: WebServer) -> str:
    named: str = (await server.get("/weight_info"))[1]["weight_version"]
    return named


async def test_a_rollout_has_the_weights_of_its_step() -> None:
    async with web_server(admin=True) as server:
        rollout, trainer = TrlRollout(server.url, seed=1), make_trainer()
        for step, expected in ((0, "step-1"), (0, "step-1"), (1, "step-2")):
            trainer.state.global_step = step
            out = await asyncio.to_thread(rollout, ["ab", [{"role": "user", "content": "c"}]], trainer)
            assert await version(server) == expected
        assert out["prompt_ids"] == [list(b"ab"), list(b"<c>")]
        submits = server.scheduler.submits[-2:]
        assert out["completion_ids"] == [random_tokens(submit, 0)[:4] for submit in submits]
        assert [len(each) for each in out["logprobs"]] == [4, 4]
        assert submits[0].sampling.temperature == 0.5
        rollout.transfer.destroy()


async def test_the_hook_of_the_asynchronous_trainer() -> None:
    async with web_server(admin=True) as server:
        transfer = TrlWeightTransfer(server.url)
        await asyncio.to_thread(transfer.init_weight_transfer)
        await asyncio.to_thread(transfer.pause)
        await asyncio.to_thread(transfer.send_weights, iter([("w", torch.zeros(2))]))
        await asyncio.to_thread(transfer.resume)
        transfer.destroy()
        assert server.scheduler.acts == [
            *("Pause", "BeginUpdate", "LoadTensors", "VerifyUpdate", "CommitUpdate", "Resume")
        ]
