"""What trainers send whose clients cannot be run here, taken from their source, against a running server.

    toka-async serve server.admin=true &
    python scripts/rl/replay_others.py http://127.0.0.1:10210

NeMo-RL at 7ea279a (nemo_rl/models/generation/sglang/: sglang_generation.py, sglang_worker.py), and vime, the vLLM
project's form of slime, of August 2026: its repository could not be read again, so these are the calls that were noted
of it then.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any


class Server:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: Any = None, is_get: bool = False) -> tuple[int, Any]:
        """Returns the status and the body, parsed if it is JSON."""
        data = None if is_get else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text[:1] in b"{[" else text.decode()

    def ok(self, path: str, body: Any = None, is_get: bool = False) -> Any:
        status, answer = self.ask(path, body, is_get)
        assert status == 200, (path, status, answer)
        return answer


def replay_nemo(server: Server) -> None:
    """Of its SGLang workers: rollouts, memory, cache. Their weights come as pickles, which are refused."""
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 64,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "stop_token_ids": [2],
        "stop": ["####"],
    }
    greedy = {**sampling, "temperature": 0.0, "top_k": 1}
    for params in (sampling, greedy):
        output = server.ok("/generate", {"sampling_params": params, "return_logprob": True, "input_ids": [5, 6, 7]})
        found = output["meta_info"]["output_token_logprobs"]
        assert all(isinstance(item[0], float) and isinstance(item[1], int) for item in found)
        assert output["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    server.ok("/health_generate", is_get=True)
    tags = ["weights", "kv_cache", "cuda_graph"]
    for _ in range(2):
        server.ok("/flush_cache", is_get=True)
        assert server.ok("/release_memory_occupation", {"tags": tags})["success"]
        assert server.ok("/resume_memory_occupation", {"tags": ["weights"]})["success"]
        assert server.ok("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})["success"]
    server.ok("/weights_checker", {"action": "checksum"})
    body = {"serialized_named_tensors": ["gASVAAAA"], "load_format": "flattened_bucket", "flush_cache": False}
    status, answer = server.ask("/update_weights_from_tensor", body)
    assert status >= 400
    print("nemo-rl: its update of weights by pickles is refused:", answer)


def replay_vime(server: Server) -> None:
    """Of vLLM's routes: samples, aborted in the middle and gone on with."""
    model = server.ok("/v1/models", is_get=True)["data"][0]["id"]
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 1500,
        "logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
    }
    answers: list[Any] = []
    body = {
        "model": model,
        "token_ids": [5, 6, 7],
        "sampling_params": sampling,
        "request_id": "vime-1",
        "stream": False,
    }
    thread = threading.Thread(target=lambda: answers.append(server.ok("/inference/v1/generate", body)))
    thread.start()
    time.sleep(0.3)
    while not server.ok("/abort_requests", {"request_ids": ["vime-1"]})["aborted"]:
        assert not answers
    thread.join()
    (choice,) = answers[0]["choices"]
    assert choice["finish_reason"] == "abort"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    rest = {**sampling, "max_tokens": 20}
    again = server.ok(
        "/inference/v1/generate",
        {"model": model, "token_ids": [5, 6, 7, *choice["token_ids"]], "sampling_params": rest},
    )
    assert len(again["choices"][0]["token_ids"]) == 20
    assert again["choices"][0]["weight_versions"]
    server.ok("/pause?mode=keep&clear_cache=false")
    assert server.ok("/is_paused", is_get=True) == {"is_paused": True}
    server.ok("/resume")
    print("vime: a sample was aborted with", len(choice["token_ids"]), "tokens and gone on with")


if __name__ == "__main__":
    replay_nemo(Server(sys.argv[1]))
    replay_vime(Server(sys.argv[1]))
