"""Requests of many kinds, and all that a client learns of them, to the last bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.drivers.core import Received
from tests.drivers.engine import GREEDY, Engine
from tests.drivers.page_rank import submit
from toka_async.messages import TokenSampling

SAMPLINGS = (
    TokenSampling(temperature=0.8, top_p=0.9, num_logprobs=3),
    TokenSampling(num_logprobs=0),
    TokenSampling(temperature=0.0, presence_penalty=0.5, num_logprobs=7),
    TokenSampling(temperature=1.0, top_k=20, repetition_penalty=1.1, num_logprobs=0),
    TokenSampling(temperature=0.0, num_logprobs=0),
    TokenSampling(temperature=0.7, num_logprobs=2, num_prompt_logprobs=4),
    TokenSampling(temperature=1.0, min_p=0.02, frequency_penalty=0.3),
)


@dataclass(slots=True, frozen=True)
class AskedRequest:
    prompt: list[int]
    seed: int
    sampling: TokenSampling
    n: int
    max_tokens: int

    def submit_to(self, engine: Engine) -> Received:
        request_id = len(engine.driver.received)
        return engine.driver.submit(
            submit(
                request_id,
                self.prompt,
                seed=self.seed,
                sampling=self.sampling,
                n=self.n,
                max_tokens=self.max_tokens,
            )
        )


def make_requests(count: int, longest: int, max_tokens: int, seed: int = 0) -> list[AskedRequest]:
    """Makes prompts of 1 to `longest` tokens, a third of which begin like another one."""
    draw = random.Random(seed)
    requests: list[AskedRequest] = []
    for index in range(count):
        prompt = [draw.randrange(250) for _ in range(draw.randint(1, longest))]
        if index % 3 == 2:
            before = requests[draw.randrange(index)].prompt
            prompt = [*before[: draw.randint(1, len(before))], *prompt][:longest]
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        requests.append(AskedRequest(prompt, draw.randrange(2**40), sampling, 1 + index % 3, max_tokens))
    return requests


def list_answers(received: Received) -> list[object]:
    """Lists the tokens and log-probs of a request's samples and of its prompt."""
    assert received.failed is None, received.failed
    answers: list[object] = [(s.token_ids, s.logprobs, s.top_ids) for s in received.samples]
    if received.prefilled is not None and len(received.prefilled.logprobs):
        prompt = received.prefilled
        answers += [bytes(column) for column in (prompt.logprobs, prompt.top_ids, prompt.top_logprobs, prompt.ranks)]
    return answers


def answer_alone(engine: Engine, asked: AskedRequest) -> list[object]:
    """Answers the only request that runs."""
    received = asked.submit_to(engine)
    engine.driver.drain()
    return list_answers(received)


def load_others(engine: Engine, count: int) -> None:
    """Submits `count` requests of eight tokens that nobody looks at, so that they run beside others."""
    for index in range(count):
        AskedRequest([index % 250, 7, 11], index, GREEDY, 1, 8).submit_to(engine)
