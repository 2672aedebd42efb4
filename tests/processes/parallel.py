"""What several ranks must answer as one does: prompts, their greedy tokens, and clients that see a process die.

The prompts share prefixes, are longer than a step, ask for several samples, and begin where pages do.
"""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.cases.models import make_checkpoint
from tests.drivers.until import wait_until
from tests.processes.serving import Asking, Serving
from toka_async.topology import Layout

TIE = 1e-3  # between the reference's own logits, where either token is right
OPTIONS = (
    "model.served_name=m",
    "cache.num_tokens=32768",
    "schedule.max_tokens=256",
    "schedule.max_seqs=64",
    "schedule.group_min_seqs=2",
    "schedule.group_min_tokens=32",
    "tuning.dir=",
    "attention.num_threads=1",
    "log.stats_interval=0",
    "parallel.gpu_locks=",  # tests may share GPUs
)
SHARED = [(7 * i + 3) % 256 for i in range(193)]
# (prompt, samples, seconds until it is asked): 193 tokens are 12 pages and the one that samples begin with.
REQUESTS: list[tuple[list[int], int]] = [
    ([7], 1),
    ([1, 2, 3, 4, 5], 2),
    (SHARED, 3),
    (SHARED, 2),
    ([*SHARED, 9], 4),
    ([*SHARED, 10, 11], 1),
    (SHARED[:97], 3),
    ([(11 * i) % 251 for i in range(700)], 1),
    ([(13 * i + 5) % 241 for i in range(330)], 2),
    ([*SHARED, *range(200)], 1),
]
MOST_RANKS = 8
ERRORS = (OSError, http.client.HTTPException)  # of a server that is gone


def make_model(folder: Path, family: str = "qwen3", **fields: Any) -> Path:
    """8 layers, 8 heads, 2 KV heads."""
    shape = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    return make_checkpoint(folder, family, seed=5, max_position_embeddings=2048, **shape | fields)


def ask(server: Asking, prompt: list[int], num_samples: int, max_tokens: int) -> tuple[int, Any]:
    return server.post(
        "/v1/completions",
        model="m",
        prompt=prompt,
        n=num_samples,
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )


def ask_all(server: Asking, max_tokens: int) -> list[list[int]]:
    """The tokens of every sample of every request, all asked at once."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        asked = [pool.submit(ask, server, *request, max_tokens) for request in REQUESTS]
        answers = [answer.result() for answer in asked]
    assert all(status == 200 for status, _ in answers), [answer for status, answer in answers if status != 200]
    return [choice["token_ids"] for _, answer in answers for choice in answer["choices"]]


def all_layouts(num_layers: int, tensor_sizes: Sequence[int]) -> Iterator[Layout]:
    """Every division of a model among MOST_RANKS processes at most."""
    for dp in range(1, MOST_RANKS + 1):
        for pp in range(1, min(MOST_RANKS // dp, num_layers) + 1):
            for tp in tensor_sizes:
                if dp * pp * tp <= MOST_RANKS:
                    yield Layout(dp, pp, tp)


class Reference:
    """The same model in one process: transformers'."""

    def __init__(self, folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model = model.eval()
        self._known: dict[tuple[int, ...], float] = {}

    def gap(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """The most that a token's logit is below the largest one."""
        key = (*prompt, -1, *tokens)
        if key not in self._known:
            with torch.inference_mode():
                logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            gaps = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            self._known[key] = float(gaps.max())
        return self._known[key]


def check_tokens(reference: Reference, expected: list[list[int]], answers: list[list[int]], max_tokens: int) -> int:
    """How many samples differ from what is expected by tokens that tie; an AssertionError for any other difference."""
    prompts = [prompt for prompt, num_samples in REQUESTS for _ in range(num_samples)]
    num_ties = 0
    for prompt, right, tokens in zip(prompts, expected, answers, strict=True):
        assert len(tokens) == max_tokens
        if tokens != right:
            gap = reference.gap(prompt, tokens)
            assert gap < TIE, f"a token is {gap} below the likeliest after {len(prompt)} tokens of a prompt"
            num_ties += 1
    return num_ties


@dataclass(slots=True)
class Outcomes:
    """What clients saw when a process died."""

    num_right: int = 0
    num_errors: int = 0
    num_wrong: int = 0
    messages: list[str] = field(default_factory=list)


def count_generated(server: Serving) -> float:
    lines = server.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("toka:generation_tokens_total"))


def kill_under_load(server: Serving, name: str, max_tokens: int) -> Outcomes:
    """Kills a process by SIGKILL while clients wait, half of them for a stream; returns when all know what came of it.

    A whole answer is right when it has all its tokens; a stream when it ends without an error.
    """
    outcomes = Outcomes()

    def whole(request: tuple[list[int], int]) -> None:
        try:
            status, answer = ask(server, *request, max_tokens)
        except ERRORS as error:
            _failed(outcomes, repr(error))
            return
        if status != 200:
            _failed(outcomes, answer["error"]["message"])
        elif all(len(choice["token_ids"]) == max_tokens for choice in answer["choices"]):
            outcomes.num_right += 1
        else:
            outcomes.num_wrong += 1

    def stream(request: tuple[list[int], int]) -> None:
        prompt, num_samples = request
        fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "n": num_samples}
        try:
            events = [*server.stream("/v1/completions", model="m", prompt=prompt, **fields)]
        except ERRORS as error:
            _failed(outcomes, repr(error))
            return
        if not events or "error" in events[-1]:
            _failed(outcomes, str(events[-1:]))
            return
        ends = [choice["finish_reason"] for event in events for choice in event["choices"]]
        if ends.count("length") == num_samples:
            outcomes.num_right += 1
        else:
            _failed(outcomes, "the stream was cut")

    enough = count_generated(server) + 8 * sum(num_samples for _, num_samples in REQUESTS)
    with ThreadPoolExecutor(2 * len(REQUESTS)) as pool:
        clients = [pool.submit(kind, request) for request in REQUESTS for kind in (whole, stream)]
        wait_until(lambda: count_generated(server) >= enough)  # so that streams have begun
        os.kill(server.children[name], signal.SIGKILL)
        for client in clients:
            client.result(timeout=60)
    return outcomes


def _failed(outcomes: Outcomes, message: str) -> None:
    outcomes.num_errors += 1
    outcomes.messages.append(message)
