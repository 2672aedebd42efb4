"""atroposlib 0.4.0's SGLangServer against a running server, unmodified.

toka-async serve &
python scripts/rl/use_atropos.py http://127.0.0.1:10210 toka_async/demo
"""

from __future__ import annotations

import asyncio
import sys

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer


async def main(url: str, tokenizer: str) -> None:
    config = APIServerConfig(
        base_url=f"{url}/v1", model_name="demo", tokenizer_name=tokenizer, api_key="none", timeout=60
    )
    server = SGLangServer(config)
    prompt, outputs, logprobs, reasons = await server.tokens_and_logprobs_completion(
        prompt="Question: what is 3 + 4?", n=4, max_tokens=32, temperature=1.0, top_p=1.0, stop=["####"]
    )
    assert [len(each) for each in outputs] == [len(each) for each in logprobs]
    assert len(outputs) == 4
    print("tokens:", [len(each) for each in outputs], reasons)
    _, again, _, _ = await server.tokens_and_logprobs_completion(input_ids=prompt, n=1, max_tokens=8, temperature=0)
    assert len(again) == 1
    chat = await server.chat_completion(messages=[{"role": "user", "content": "hi"}], n=2, max_tokens=8)
    assert len(chat.choices) == 2
    if server.check_task is not None:
        server.check_task.cancel()
    print("atropos: done")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
