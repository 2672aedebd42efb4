"""TRL 1.16's VLLMClient against a running server, unmodified: generate, chat, and a teacher's log-probs.

    toka-async serve server.admin=true model.logprobs_mode=processed limits.max_logprobs=100 &
    python scripts/rl/use_trl_client.py http://127.0.0.1:10210

TRL asks whether vLLM is installed, and imports some of its names. A stub with these names stands in for it here.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

STUB = {
    "vllm/__init__.py": "__version__ = '0.32.0'\nLLM = RequestOutput = SamplingParams = None",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "def get_ip(): return '127.0.0.1'\ndef get_open_port(): return 0",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_common.py": "def trainer_init(info): raise NotImplementedError",
    "vllm/distributed/weight_transfer/packed_tensor.py": "def packed_nccl_broadcast_producer(**_): pass",
    "vllm/sampling_params.py": "StructuredOutputsParams = None",
    "vllm/lora/__init__.py": "",
    "vllm/lora/request.py": "LoRARequest = None",
    "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


def main(url: str) -> None:
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=url)
    print("world size:", client.get_world_size())
    config = client.get_server_info()
    print("dtype:", config["model_config"]["dtype"], "|", config["model_config"]["logprobs_mode"])
    out = client.generate(PROMPTS, n=3, max_tokens=16, temperature=0.8, top_k=20, logprobs=0)
    assert out["prompt_ids"] == PROMPTS
    assert len(out["completion_ids"]) == 6
    for ids, logged in zip(out["completion_ids"], out["logprob_token_ids"], strict=True):
        assert [[token_id] for token_id in ids] == logged
    chat = client.chat([[{"role": "user", "content": "hi"}]] * 2, n=2, max_tokens=8, logprobs=2)
    assert len(chat["prompt_ids"]) == 2
    assert len(chat["completion_ids"]) == 4
    scored = client.get_sequence_logprobs([[*each, 12, 13] for each in PROMPTS], [3, 4], top_logprobs=100)
    assert [len(each) for each in scored["logprobs"]] == [2, 2]
    assert all(len(place) == 100 for each in scored["logprobs"] for place in each)
    client.reset_prefix_cache()
    print("trl: generate, chat and 100 log-probs of each token of a teacher")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, text in STUB.items():
            (path := Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        sys.path.insert(0, folder)
        main(sys.argv[1])
