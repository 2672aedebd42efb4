"""Prompts for loads: few-shot questions from JSONL files, or invented word problems.

Few-shot prompts follow Large Language Monkeys (Brown et al., arXiv:2407.21787): each question has worked examples of
its own before it. Knows no tokens and no server.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec

from toka_async.bench.loads.served import BenchError

NAMES = ("Amara", "Bo", "Chen", "Dina", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena", "Mei", "Noah")
THINGS = ("apples", "marbles", "stickers", "pencils", "postcards", "seeds", "buttons", "coins", "shells", "tickets")
PLACES = ("at the market", "in the garden", "at school", "in the old workshop", "at the station", "by the lake")
NUM_STEPS = 5  # steps of an invented problem, which makes it about as long as one of GSM8K's with its solution


class Problem(msgspec.Struct, frozen=True):
    """A line of a file; other fields are ignored."""

    question: str
    answer: str


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Opens a text file, plain or .gz. Raises BenchError when it cannot be read."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
                yield file
        else:
            with path.open(encoding="utf-8", newline="") as file:
                yield file
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def read_problems(path: Path) -> list[Problem]:
    """Reads a JSONL file. Raises BenchError, which names the wrong line."""
    problems = []
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                problems.append(msgspec.json.decode(line, type=Problem))
            except msgspec.DecodeError as error:
                raise BenchError(f"{path}: line {number}: {error}") from None
    if not problems:
        raise BenchError(f"{path}: no lines")
    return problems


def few_shot(
    questions: Sequence[Problem], shots: Sequence[Problem], num_prompts: int, num_shots: int, draw: random.Random
) -> list[str]:
    """Returns `num_prompts` different questions, each after `num_shots` worked examples drawn for it.

    Raises BenchError when there are too few questions or examples.
    """
    if num_prompts > len(questions):
        raise BenchError(f"--prompts {num_prompts}: there are {len(questions)} questions")
    prompts = []
    for asked in draw.sample(questions, num_prompts):
        examples = [shot for shot in shots if shot.question != asked.question]
        if num_shots > len(examples):
            raise BenchError(f"--shots {num_shots}: there are {len(examples)} worked examples")
        worked = "".join(f"Question: {s.question}\nAnswer: {s.answer}\n\n" for s in draw.sample(examples, num_shots))
        prompts.append(f"{worked}Question: {asked.question}\nAnswer:")
    return prompts


def invent_prompts(num_prompts: int, num_shots: int, draw: random.Random) -> list[str]:
    """Returns few-shot prompts of invented problems; no two prompts begin alike for long."""
    prompts = []
    for _ in range(num_prompts):
        problems = [word_problem(draw) for _ in range(num_shots + 1)]
        prompts += few_shot(problems[-1:], problems[:-1], 1, num_shots, draw)
    return prompts


def word_problem(draw: random.Random) -> Problem:
    """Invents a problem of gains and losses, with the sums worked out."""
    name, friend = draw.sample(NAMES, 2)
    thing, place, count = draw.choice(THINGS), draw.choice(PLACES), draw.randint(40, 400)
    story = [f"One morning {place}, {name} counts {count} {thing} and writes the number down."]
    worked = [f"{name} starts with {count} {thing}."]
    for _ in range(NUM_STEPS):
        change = draw.randint(3, 30)
        if draw.random() < 0.5:
            story.append(f"Then {friend} brings {change} more {thing}, which {name} keeps.")
            worked.append(f"After that there are {count} + {change} = {count + change} {thing}.")
            count += change
        else:
            story.append(f"Later {name} gives {change} of the {thing} away to {friend}.")
            worked.append(f"After that there are {count} - {change} = {count - change} {thing}.")
            count -= change
    story.append(f"How many {thing} does {name} have in the end?")
    return Problem(" ".join(story), "\n".join([*worked, f"#### {count}"]))
