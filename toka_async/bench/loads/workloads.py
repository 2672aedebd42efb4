"""Builds the loads of `bench serve-load` from its options: bodies of requests to /v1/completions. Knows no HTTP."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from typing import Any

from toka_async.bench.loads.served import BenchError
from toka_async.bench.loads.texts import few_shot, invent_prompts, read_problems
from toka_async.bench.loads.trace import draw_trace, read_trace

Body = dict[str, Any]

REQUESTS = {"trace": 4096, "single": 8}
WARM_REQUESTS = {"samples": 4, "ends": 4, "rollouts": 64, "trace": 256, "single": 1}
ROLLOUT_SAMPLES = 16  # of each prompt
MOST_OVER_MEAN = 16  # the longest rollout is at most so many times as long as the mean
WARM_SAMPLES = 256
WARM_TOKENS = 32


def build_bodies(options: argparse.Namespace, model: str, vocab_size: int | None, run: int) -> list[Body]:
    """Builds the requests of a run: the same lengths in every run, with new prompts.

    Raises BenchError when a file cannot be used, or the vocabulary's size is needed and unknown.
    """
    draw = random.Random(f"{options.load} {options.seed} {run}")
    match options.load:
        case "samples":
            asked = build_samples(options, draw)
        case "ends":
            asked = build_ends(options, draw, choose_vocab(options, vocab_size))
        case "rollouts":
            asked = build_rollouts(options, draw)
        case "trace":
            asked = build_trace(options, draw, choose_vocab(options, vocab_size))
        case "single":
            asked = build_single(options, draw)
        case _:
            raise AssertionError(f"no load {options.load}")
    common = shared_fields(options, model)
    return [common | body for body in asked]


def build_warm_bodies(options: argparse.Namespace, model: str, vocab_size: int | None) -> list[Body]:
    """Builds the first requests of another run, with fewer samples and tokens."""
    few = build_bodies(options, model, vocab_size, run=-1)[: WARM_REQUESTS[options.load]]
    return [
        body | {"n": min(body["n"], WARM_SAMPLES), "max_tokens": min(body["max_tokens"], WARM_TOKENS)} for body in few
    ]


def build_probe_bodies(options: argparse.Namespace, model: str, vocab_size: int | None) -> list[Body]:
    """Builds a small load of the same kind: one prompt, enough samples and tokens to tell the server's rate."""
    first = build_bodies(options, model, vocab_size, run=-2)[0]
    return [first | {"n": WARM_SAMPLES, "max_tokens": min(first["max_tokens"], WARM_TOKENS)}]


def shared_fields(options: argparse.Namespace, model: str) -> Body:
    fields: Body = {"model": model, "temperature": options.temperature, "n": 1}
    top_p = options.top_p
    if top_p is None and options.load != "trace":  # requests of a trace keep the model's default
        top_p = 1.0
    if top_p is not None:
        fields["top_p"] = top_p
    if options.stop:
        fields["stop"] = options.stop
    if options.logprobs is not None:
        fields["logprobs"] = options.logprobs
    if options.stream or options.load == "single":
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def build_samples(options: argparse.Namespace, draw: random.Random) -> list[Body]:
    """Builds requests for many samples of each prompt, all of the same length."""
    fixed = {"n": options.samples, "max_tokens": options.output_tokens or 192, "ignore_eos": True}
    return [{"prompt": prompt, "seed": draw.getrandbits(31), **fixed} for prompt in build_prompts(options, draw)]


def build_ends(options: argparse.Namespace, draw: random.Random, vocab_size: int) -> list[Body]:
    """Builds requests whose samples end by themselves: a random share 1 / mean of the vocabulary ends them.

    So a model with random weights ends each token with about that chance, in the engine's ordinary way.
    """
    count = max(1, round(vocab_size / options.mean_tokens))
    last = {"n": options.samples, "max_tokens": options.output_tokens or 1024}
    return [
        {
            "prompt": prompt,
            "seed": draw.getrandbits(31),
            "stop_token_ids": draw.sample(range(vocab_size), count),
            **last,
        }
        for prompt in build_prompts(options, draw)
    ]


def build_rollouts(options: argparse.Namespace, draw: random.Random) -> list[Body]:
    """Builds one request for each sample, as trainers send them: those of a prompt follow each other.

    Lengths have a heavy tail: they are log-normal around the prompt's own mean, which is log-normal too, as for
    problems of unequal difficulty. They are the same in every run, and the server is told them as max_tokens.
    """
    lengths = random.Random(options.seed)
    most = options.output_tokens or MOST_OVER_MEAN * options.mean_tokens
    asked = []
    for prompt in build_prompts(options, draw):
        typical = options.mean_tokens / 2 * math.exp(lengths.gauss(0, 0.6))  # the mean is about twice the median
        for _ in range(options.samples or ROLLOUT_SAMPLES):
            length = min(most, max(1, round(typical * math.exp(lengths.gauss(0, 1.0)))))
            asked.append({"prompt": prompt, "seed": draw.getrandbits(63), "max_tokens": length, "ignore_eos": True})
    return asked


def build_trace(options: argparse.Namespace, draw: random.Random, vocab_size: int) -> list[Body]:
    """Builds requests with a trace's lengths and random prompts."""
    num_requests = options.requests or REQUESTS["trace"]
    if options.trace is not None:
        lengths = read_trace(options.trace, num_requests)
    else:
        lengths = draw_trace(num_requests, random.Random(options.seed))
    usual = range(vocab_size // 64, vocab_size * 3 // 4)  # special tokens are at a vocabulary's ends
    return [
        {"prompt": draw.choices(usual, k=num_prompt), "max_tokens": num_output, "ignore_eos": True}
        for num_prompt, num_output in lengths
    ]


def build_single(options: argparse.Namespace, draw: random.Random) -> list[Body]:
    """Builds requests of one user, to be sent one after the other."""
    num_requests = options.requests or REQUESTS["single"]
    fixed = {"max_tokens": options.output_tokens or 256, "ignore_eos": True}
    return [{"prompt": prompt, **fixed} for prompt in invent_prompts(num_requests, options.shots, draw)]


def build_prompts(options: argparse.Namespace, draw: random.Random) -> list[str]:
    """Returns the prompts of a load of many samples."""
    if options.questions is None:
        return invent_prompts(options.prompts, options.shots, draw)
    questions = read_problems(options.questions)
    shots = questions if options.shots_file is None else read_problems(options.shots_file)
    return few_shot(questions, shots, options.prompts, options.shots, draw)


def choose_vocab(options: argparse.Namespace, served: int | None) -> int:
    """Returns the vocabulary's size, from the user or else from the server."""
    size: int | None = options.vocab or served
    if size is None:
        raise BenchError(f"--load {options.load} draws token ids and the server does not say how many: give --vocab")
    return size


def num_sequences(asked: Sequence[Body]) -> int:
    return sum(body["n"] for body in asked)
