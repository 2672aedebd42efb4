"""What clients ask, and the right answer of each: a function of the question, whatever happens to the server.

Knows the fields of the API; knows no connection.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NUM_SHORT, NUM_MANY = 40, 5
LONG_TOKENS = 2045  # of a context of 2,048: they take longer than `limits.request_timeout` where steps take their time
SHARED = [(7 * i + 3) % 250 for i in range(96)]
STOPS = ("e", "th", "9", "or")


@dataclass(frozen=True, slots=True)
class Sample:
    """One of an answer. token_ids: None where they are not told."""

    text: str
    token_ids: tuple[int, ...] | None
    reason: str

    def agrees(self, other: Sample) -> bool:
        ids = None in (self.token_ids, other.token_ids) or self.token_ids == other.token_ids
        return ids and self.text == other.text and self.reason == other.reason


@dataclass(slots=True)
class Question:
    """fields: of /v1/completions, but for the prompt. right: its answer, once it is known."""

    prompt: str | list[int] | list[list[int]]
    fields: dict[str, Any]
    right: list[Sample] = field(default_factory=list)

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "return_token_ids": True, **self.fields}

    @property
    def num_samples(self) -> int:
        num_prompts = len(self.prompt) if isinstance(self.prompt, list) and isinstance(self.prompt[0], list) else 1
        return num_prompts * int(self.fields.get("n", 1))

    @property
    def text_or_ids(self) -> str | list[int]:
        """The prompt of a question that has one."""
        prompt: Any = self.prompt
        return prompt  # type: ignore[no-any-return]

    @property
    def in_columns(self) -> bool:
        """Direct submission can answer it without text."""
        return "stop" not in self.fields and not isinstance(self.prompt, str)

    def fault(self, samples: Sequence[Sample]) -> str | None:
        """What is wrong with an answer, if anything is."""
        if len(samples) != len(self.right):
            return f"{len(samples)} samples instead of {len(self.right)}"
        for number, (sample, right) in enumerate(zip(samples, self.right, strict=True)):
            if not sample.agrees(right):
                return f"sample {number} of {self.fields} is {sample}, not {right}"
        return None


def whole_answer(answer: Mapping[str, Any]) -> list[Sample]:
    """The samples of a response of /v1/completions."""
    return [
        Sample(choice["text"], tuple(choice["token_ids"]), choice["finish_reason"])
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    ]


class Questions:
    """A fixed number of questions, drawn with a seed.

    short: of one prompt. many: of several, which direct submission has no messages for. long: those that no deadline
    lets through.
    """

    def __init__(self, draw: random.Random) -> None:
        self.short = [question(draw, number) for number in range(NUM_SHORT)]
        self.many = [many(draw, number) for number in range(NUM_MANY)]
        fields = {"max_tokens": LONG_TOKENS, "ignore_eos": True, "seed": 5}
        self.answerable = [*self.short, *self.many]
        self.long = [Question([9, 9, number], {**fields, "n": 1 + number}) for number in range(3)]


def question(draw: random.Random, number: int) -> Question:
    """Of all kinds: text and ids, shared beginnings, several samples, stop strings, log-probs."""
    shared = SHARED[: draw.choice([0, 0, 32, 96])]
    ids = [*shared, number, *(draw.randrange(3, 250) for _ in range(draw.choice([1, 5, 40, 120])))]
    prompt: str | list[int] = f"Question {number}: {'how many? ' * draw.randrange(20)}" if draw.random() < 0.3 else ids
    fields: dict[str, Any] = {
        "max_tokens": draw.choice([1, 4, 16, 60, 150]),
        "n": draw.choice([1, 1, 1, 2, 3, 12]),
        "seed": draw.randrange(2**62),
        "ignore_eos": draw.random() < 0.5,
    }
    if draw.random() < 0.25:
        fields["stop"] = draw.sample(STOPS, draw.choice([1, 2]))
    if draw.random() < 0.15:
        fields["logprobs"] = draw.choice([0, 2])
    return Question(prompt, fields)


def many(draw: random.Random, number: int) -> Question:
    prompts = [[*SHARED[: draw.choice([0, 40])], number, index] for index in range(draw.randrange(2, 30))]
    return Question(prompts, {"max_tokens": draw.choice([3, 30, 90]), "n": draw.choice([1, 2]), "seed": number})
