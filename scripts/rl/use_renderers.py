"""renderers 0.1.12 (the client of verifiers and prime-rl) against a running server, unmodified.

    toka-async serve server.admin=true &
    python scripts/rl/use_renderers.py http://127.0.0.1:10210 toka_async/demo

`renderers.client.generate` raises on any answer whose shape it does not know, so that it returns is the test.
"""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI
from renderers import DefaultRendererConfig, create_renderer
from renderers.client import OverlongPromptError, generate
from transformers import AutoTokenizer

CHAT = "Mia buys 3 pens for 4 dollars each and 2 books for 5 dollars each. How much does Mia pay?"


async def main(url: str, tokenizer: str) -> None:
    renderer = create_renderer(AutoTokenizer.from_pretrained(tokenizer), DefaultRendererConfig())
    messages = [{"role": "user", "content": CHAT}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        asked = {"client": client, "renderer": renderer, "messages": messages, "model": model}
        sampling = {"temperature": 2.0, "top_p": 1.0, "max_tokens": 64, "top_k": -1}
        first = await generate(**asked, sampling_params=sampling, cache_salt="1", priority=0)
        assert len(first["completion_ids"]) == len(first["completion_logprobs"]) > 0
        assert all(value <= 0 for value in first["completion_logprobs"])
        greedy = [await generate(**asked, sampling_params={"temperature": 0, "max_tokens": 64}) for _ in range(2)]
        assert greedy[0]["completion_ids"] == greedy[1]["completion_ids"]
        together = await asyncio.gather(*(generate(**asked, sampling_params=sampling) for _ in range(64)))
        assert len({tuple(each["completion_ids"]) for each in together}) > 1
        try:
            await generate(**asked, max_prompt_len=1)
        except OverlongPromptError as error:
            print("an overlong prompt:", error)
        print("greedy:", greedy[0]["content"][:80], "|", greedy[0]["finish_reason"], greedy[0]["usage"])
    print("renderers: 67 answers, all of the right shape")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
