"""prime-rl's admin client against a running server: weights from a folder, and a teacher's log-probs.

    toka-async serve server.admin=true &
    PYTHONPATH=path/to/prime-rl/src python scripts/rl/use_prime_rl.py http://127.0.0.1:10210 toka_async/demo

Its rollouts go through renderers: `use_renderers.py`. Stubs stand in for verifiers, vLLM and its configuration.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from httpx import AsyncClient
from openai import AsyncOpenAI
from stubs import stand_in_for


async def main(url: str, model: str) -> None:
    stand_in_for("verifiers", "renderers", "vllm", "prime_rl.configs")
    from prime_rl.utils import client

    admins = [AsyncClient(base_url=url, timeout=60)]
    await client.check_health(admins)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as openai:
        name = (await openai.models.list()).data[0].id
        await client.maybe_check_has_model(admins, name)
        await client.init_nccl_broadcast(admins, "127.0.0.1", 29501, 60)  # is a 404, which it goes on after
        long = asyncio.create_task(
            openai.completions.create(model=name, prompt=[5, 6, 7], max_tokens=1500, extra_body={"ignore_eos": True})
        )
        with tempfile.TemporaryDirectory() as folder:
            step = Path(folder) / "step_1"
            shutil.copytree(model, step)
            (step / "STABLE").touch()
            for number in (1, 2):
                await client.update_weights(admins, step, step=number)
        assert (await long).choices[0].finish_reason == "length"
        ids = [5, 6, 7, 8, 9]
        scores = await client.prefill_logprobs(openai, name, ids)
        assert len(scores) == len(ids)
        assert scores[0] == 0.0
        scored = await openai.completions.create(
            model=name, prompt=ids, max_tokens=1, logprobs=1, temperature=0, extra_body={"echo": True}
        )
        given = scored.choices[0].logprobs
        assert given is not None
        assert given.token_logprobs is not None
        own = [value for value in given.token_logprobs[1 : len(ids)] if value is not None]
        assert all(abs(one - other) < 1e-4 for one, other in zip(own, scores[1:], strict=True)), (own, scores)
    print("prime-rl: 2 updates from a folder in the middle of a request; log-probs of a prompt:", scores)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
