"""SkyRL 0.3.0's RemoteInferenceClient against a running server, unmodified (Python 3.12, without torch).

pip install --no-deps skyrl==0.3.0 && pip install aiohttp pydantic rich numpy
toka-async serve server.admin=true &
python scripts/rl/use_skyrl.py http://127.0.0.1:10210
"""

from __future__ import annotations

import asyncio
import sys

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import PauseMode, RemoteInferenceClient

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


async def main(url: str) -> None:
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="")
    try:
        print("world size:", await client.get_world_size())
        sampling = {"max_tokens": 16, "temperature": 1.0, "logprobs": 0}
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": sampling, "session_ids": ["a", "b", "c"]}
        out = await client.generate({**batch, "cache_salt": "1"}, model="")
        assert [len(ids) for ids in out["response_ids"]] == [len(each) for each in out["response_logprobs"]]
        assert len(out["responses"]) == 3
        print("generate:", out["stop_reasons"])

        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
            "num_samples": 4,
            "sampling_params": {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "seed": 5},
            "include_prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
            "model": "",
        }
        sampled = await client.sample({"json": body})
        assert len(sampled["sequences"]) == 4
        assert len(sampled["prompt_logprobs"]) == 3
        print("sample:", [len(each["tokens"]) for each in sampled["sequences"]], sampled["prompt_logprobs"])

        await client.pause(PauseMode.KEEP)
        waiting = asyncio.create_task(client.generate(batch, model=""))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await client.reset_prefix_cache()
        await client.resume()
        assert len((await waiting)["responses"]) == 3

        long = {**batch, "sampling_params": {"max_tokens": 400, "ignore_eos": True, "logprobs": 0}}
        running = asyncio.create_task(client.generate(long, model=""))
        await asyncio.sleep(0.2)
        await client.pause(PauseMode.ABORT)
        cut = await running
        print("aborted:", cut["stop_reasons"], [len(ids) for ids in cut["response_ids"]])
        await client.resume()

        await client.start_weight_update()
        try:
            await client.finish_weight_update()
        except Exception as error:
            print("an update without tensors is refused:", str(error)[:100])
        for call in (client.sleep(level=1), client.wake_up()):
            try:
                await call
            except Exception as error:
                print("while weights are not whole:", str(error)[:100])
    finally:
        await client.teardown()
    print("skyrl: done")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
