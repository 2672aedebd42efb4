"""Random completion requests of every kind, and what must hold of their answers.

Draws bodies from a seed: prompts of one token to thousands, new, shared and repeated; one sample or hundreds; all
sampling parameters. Checks whole answers and streamed ones alike. Knows the API; sends nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toka_async.bench.loads.texts import word_problem

Body = dict[str, Any]

STOPS = (" ", "e", "\n", "the", "####", "a\n", "never, it seems")
MOST_ENTRIES = 20_000  # of log-probs in one answer, alternatives included
TIE = 0.05  # between log-probs of bfloat16 logits
INVALID: tuple[Body, ...] = (
    {"temperature": -1},
    {"top_p": 0},
    {"n": 0},
    {"logprobs": 21},
    {"max_tokens": 1 << 30},
    {"logit_bias": {"-1": 1}},
    {"no_such_field": 1},
    {"stop": [""]},
)


class WrongError(Exception):
    """An answer that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What requests can be at most. room: tokens of prompt and completion together."""

    vocab_size: int
    room: int
    prompt: int
    tokens: int
    samples: int


@dataclass(slots=True)
class Choice:
    """One sample of an answer, put together from its parts."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[dict[str, float] | None] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, part: Body) -> None:
        """A choice of an answer, or of an event."""
        if self.finish_reason is not None:
            raise WrongError("a sample goes on after its end")
        self.text += part["text"]
        self.token_ids += part.get("token_ids", [])
        if part.get("logprobs") is not None:
            self.logprobs += part["logprobs"]["token_logprobs"]
            self.top += part["logprobs"]["top_logprobs"]
        self.prompt_logprobs = part.get("prompt_logprobs", self.prompt_logprobs)
        self.finish_reason, self.stop_reason = part["finish_reason"], part["stop_reason"]


@dataclass(slots=True)
class Answer:
    """All of one answer, whole or streamed."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Body | None = None

    def add(self, part: Body) -> None:
        if "error" in part:
            raise WrongError(f"an error in an answer: {part['error']}")
        for choice in part["choices"]:
            self.choices.setdefault(choice["index"], Choice()).add(choice)
        self.usage = part.get("usage") or self.usage


def log_uniform(draw: random.Random, least: int, most: int) -> int:
    """From least to most; as often between 1 and 10 as between 10 and 100."""
    return min(most, int(math.exp(draw.uniform(math.log(least), math.log(most + 1)))))


class Requests:
    """Draws requests; remembers prompts, so that some come again and some share their beginnings."""

    def __init__(self, draw: random.Random, sizes: Sizes) -> None:
        self._draw = draw
        self._sizes = sizes
        self._known: list[list[int]] = []

    def body(self, most_samples: int | None = None) -> Body:
        """One request that is valid."""
        draw, sizes = self._draw, self._sizes
        body: Body = {"return_token_ids": True, "max_tokens": log_uniform(draw, 1, sizes.tokens)}
        body["prompt"] = self._prompt(sizes.room - body["max_tokens"])
        body["n"] = 1 if draw.random() < 0.4 else log_uniform(draw, 1, most_samples or sizes.samples)
        body |= self._sampling() | self._end(body["max_tokens"])
        if draw.random() < 0.5:
            body["seed"] = draw.getrandbits(40)
        if draw.random() < 0.2:
            body["priority"] = draw.randint(-3, 3)
        if draw.random() < 0.4:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self._logprobs(body)

    def invalid(self) -> Body:
        """One that must be refused."""
        return {"prompt": [1, 2, 3]} | self._draw.choice(INVALID)

    def _prompt(self, most: int) -> str | list[int]:
        draw, sizes = self._draw, self._sizes
        kind = draw.random()
        if kind < 0.15:
            return f"Question: {word_problem(draw).question}\nAnswer:"
        if kind < 0.3 and self._known:
            return draw.choice(self._known)[:most]
        prompt = self._ids(log_uniform(draw, 1, sizes.prompt))
        if kind < 0.6 and self._known:
            shared = draw.choice(self._known)
            prompt = shared[: draw.randint(1, len(shared))] + prompt[: log_uniform(draw, 1, 100)]
        prompt = prompt[:most]
        self._known = [*self._known[-30:], prompt]
        return prompt

    def _ids(self, number: int) -> list[int]:
        size = self._sizes.vocab_size
        return self._draw.choices(range(size // 64, size * 3 // 4), k=number)  # special tokens are at the ends

    def _sampling(self) -> Body:
        """Each parameter now and then, so that all combinations come."""
        draw = self._draw
        if draw.random() < 0.2:
            body: Body = {"temperature": 0}
        else:
            body = {"temperature": draw.choice([0.0, 0.3, 0.6, 0.8, 1.0, 1.5, 2.0])}
        values: dict[str, tuple[float, Any]] = {
            "top_p": (0.5, draw.choice([0.1, 0.5, 0.9, 0.95, 0.999, 1.0])),
            "top_k": (0.35, draw.choice([-1, 1, 5, 20, 50, 64, 65, 100, 1000])),
            "min_p": (0.2, draw.choice([0.0, 0.01, 0.1, 0.5, 1.0])),
            "repetition_penalty": (0.2, draw.choice([0.8, 1.0, 1.05, 1.3, 2.0])),
            "presence_penalty": (0.1, draw.uniform(-2, 2)),
            "frequency_penalty": (0.1, draw.uniform(-2, 2)),
        }
        body |= {name: value for name, (chance, value) in values.items() if draw.random() < chance}
        if draw.random() < 0.08:
            number = log_uniform(draw, 1, 100)
            body["logit_bias"] = {str(i): draw.choice([-100, -5, 5, 100]) for i in self._ids(number)}
        return body

    def _end(self, max_tokens: int) -> Body:
        draw = self._draw
        body: Body = {"ignore_eos": draw.random() < 0.5}
        if draw.random() < 0.15:
            body["min_tokens"] = draw.randint(0, max_tokens)
        if draw.random() < 0.2:
            body["stop"] = draw.sample(STOPS, draw.randint(1, 3))
            body["include_stop_str_in_output"] = draw.random() < 0.3
        if draw.random() < 0.15:
            size = self._sizes.vocab_size
            body["stop_token_ids"] = draw.sample(range(size), log_uniform(draw, 1, size // 50))
        return body

    def _logprobs(self, body: Body) -> Body:
        """Log-probs and echoes, as many as an answer can reasonably hold."""
        draw, more = self._draw, {}
        num_prompt, num_tokens = len(body["prompt"]), body["n"] * body["max_tokens"]
        if draw.random() < 0.25:
            more["logprobs"] = draw.choice([0, 0, 0, 1, 2, 5, 20])
            if (more["logprobs"] + 1) * num_tokens > MOST_ENTRIES:
                more["logprobs"] = 0
        if draw.random() < 0.1 and body["n"] * num_prompt * (more.get("logprobs", 0) + 1) < MOST_ENTRIES:
            more["echo"] = True
        if draw.random() < 0.08 and "stream" not in body:
            wanted = draw.choice([0, 1, 5, 20])
            if body["n"] * num_prompt * (wanted + 1) < MOST_ENTRIES:
                more["prompt_logprobs"] = wanted
        return more


def check(body: Body, answer: Answer) -> int:
    """The number of tokens. Raises WrongError, which says what is wrong."""
    if answer.choices.keys() != set(range(body["n"])):
        raise WrongError(f"choices {sorted(answer.choices)[:10]}… of n={body['n']}")
    if answer.usage is None:
        raise WrongError("no usage")
    prompt, choices = body["prompt"], list(answer.choices.values())
    num_prompt = answer.usage["prompt_tokens"]
    if num_prompt < 1 or (isinstance(prompt, list) and num_prompt != len(prompt)):
        raise WrongError(f"{num_prompt} prompt tokens")
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    if answer.usage["completion_tokens"] != num_tokens:
        raise WrongError(f"{answer.usage['completion_tokens']} tokens in usage, {num_tokens} in the choices")
    for choice in choices:
        check_end(body, choice)
        check_logprobs(body, choice, num_prompt)
    return num_tokens


def check_end(body: Body, choice: Choice) -> None:
    """The choice ends where it has to, and nowhere else."""
    count, most, stop = len(choice.token_ids), body["max_tokens"], choice.stop_reason
    may_stop = not body["ignore_eos"] or "stop" in body or "stop_token_ids" in body
    if choice.finish_reason not in ("length", "stop") or (choice.finish_reason == "stop" and not may_stop):
        raise WrongError(f"finish_reason {choice.finish_reason!r}")
    if count > most or (choice.finish_reason == "length" and count != most):
        raise WrongError(f"{count} tokens of max_tokens={most}, finish_reason {choice.finish_reason}")
    if count < body.get("min_tokens", 0):
        raise WrongError(f"{count} tokens, min_tokens={body['min_tokens']}")
    if isinstance(stop, int) and stop not in body.get("stop_token_ids", []):
        raise WrongError(f"stopped by token {stop}")
    if isinstance(stop, str):
        clear = "echo" not in body and not body.get("min_tokens")  # what is before may end with the same
        if stop not in body["stop"] or (clear and choice.text.endswith(stop) != body["include_stop_str_in_output"]):
            raise WrongError(f"stopped by {stop!r}, text ends with {choice.text[-20:]!r}")
    if "echo" in body and isinstance(body["prompt"], str) and not choice.text.startswith(body["prompt"]):
        raise WrongError(f"an echo begins with {choice.text[:20]!r}")


def check_logprobs(body: Body, choice: Choice, num_prompt: int) -> None:
    count = len(choice.token_ids)
    if "prompt_logprobs" in body:
        entries = choice.prompt_logprobs or []
        if len(entries) != num_prompt or entries[0] is not None or None in entries[1:]:
            raise WrongError(f"{len(entries)} prompt_logprobs of {num_prompt} tokens")
    if "logprobs" not in body:
        return
    values = choice.logprobs
    if "echo" in body:
        if values[:1] != [None]:
            raise WrongError("an echo's first token has a log-prob")
        count += num_prompt
        values = values[1:]
    if len(choice.logprobs) != count:
        raise WrongError(f"{len(choice.logprobs)} log-probs of {count} tokens")
    if any(value is None or not -10_000 < value <= 1e-3 for value in values):
        raise WrongError(f"log-probs from {min(v or 1 for v in values)} to {max(v or 1 for v in values)}")
    check_greedy(body, choice)


def check_greedy(body: Body, choice: Choice) -> None:
    """The likeliest token is chosen; one forced by its bias always."""
    edits = ("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
    if body["temperature"] > 0 or any(body.get(name) for name in edits) or not body["logprobs"]:
        return
    tokens: Sequence[Any] = [*zip(choice.logprobs, choice.top, strict=True)][-len(choice.token_ids) :]
    for logprob, top in tokens:
        if logprob < max(top.values()) - TIE:
            raise WrongError(f"greedy chose {logprob} where {max(top.values())} was there")
