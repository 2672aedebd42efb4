"""Workloads for policies: the lengths of requests, from a CSV file or drawn. Knows no tokens and no scheduler."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from toka_async.arrays import Float64, Int32
from toka_async.bench.loads.served import BenchError

COLUMNS = ("prompt_tokens", "output_tokens", "max_tokens", "group")
SYSTEM = 650  # tokens of a GSM8K prompt's worked examples and of the shortest question


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and the sequences of each, one request after the other.

    prompt_tokens, max_tokens, samples: int32 [requests]. output_tokens: int32 [sequences], with the end token;
    `max_tokens` without one.
    """

    prompt_tokens: Int32
    max_tokens: Int32
    samples: Int32
    output_tokens: Int32

    @property
    def starts(self) -> Int32:
        """Returns the first sequence of each request."""
        return (np.cumsum(self.samples) - self.samples).astype(np.int32)

    @property
    def num_output_tokens(self) -> int:
        return int(self.output_tokens.sum())


def read_lengths(path: Path) -> Workload:
    """Reads a CSV file with the columns `COLUMNS`, in any order; ignores others.

    Rows with the same non-empty group are samples of one prompt, wherever they are; the first row is the request's
    place. Raises BenchError, which names line and column, for a file that cannot be read or a wrong row.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            requests = _requests(path, csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not requests:
        raise BenchError(f"{path}: no rows below the header")
    return Workload(
        prompt_tokens=_column(prompt for prompt, _, _ in requests),
        max_tokens=_column(limit for _, limit, _ in requests),
        samples=_column(len(outputs) for _, _, outputs in requests),
        output_tokens=_column(chain.from_iterable(outputs for _, _, outputs in requests)),
    )


def _requests(path: Path, rows: Iterable[list[str]]) -> list[tuple[int, int, list[int]]]:
    """Returns (prompt_tokens, max_tokens, output_tokens of each sample) of each request."""
    numbered = enumerate(rows, start=1)
    header = [name.strip() for name in next(numbered, (1, []))[1]]
    for name in COLUMNS:
        if name not in header:
            raise BenchError(f"{path}, line 1: no column {name!r}; expected {','.join(COLUMNS)}")
    places = [header.index(name) for name in COLUMNS]
    requests: list[tuple[int, int, list[int]]] = []
    by_group: dict[str, int] = {}
    for line, row in numbered:
        if not row:
            continue
        if len(row) != len(header):
            raise BenchError(f"{path}, line {line}: {len(row)} values, the header has {len(header)}")
        prompt, output, limit = (_count(path, line, COLUMNS[i], row[places[i]]) for i in range(3))
        if output > limit:
            raise BenchError(f"{path}, line {line}: output_tokens is {output}, above max_tokens {limit}")
        group = row[places[3]].strip()
        at = by_group.setdefault(group, len(requests)) if group else len(requests)
        if at == len(requests):
            requests.append((prompt, limit, []))
        for name, value, first in zip(COLUMNS[::2], (prompt, limit), requests[at], strict=False):
            if value != first:
                raise BenchError(f"{path}, line {line}: {name} is {value}, group {group!r} began with {first}")
        requests[at][2].append(output)
    return requests


def _count(path: Path, line: int, name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value < 2**31:
        raise BenchError(f"{path}, line {line}: {name}: expected an integer from 1, got {text!r}")
    return value


def _column(values: Iterable[int]) -> Int32:
    return np.fromiter(values, dtype=np.int32)


def gsm8k(requests: int, samples: int, seed: int) -> Workload:
    """Draws worked-out answers to school mathematics: many samples per prompt, long tails, some at the limit.

    Prompts have about 700 tokens. Lengths are log-normal around a mean of the prompt's own (about 230 tokens over all);
    1 in 40 samples never stops by itself. max_tokens is 1024.
    """
    rng = np.random.default_rng(seed)
    typical = 180 * np.exp(0.35 * rng.standard_normal(requests))
    lengths = np.repeat(typical, samples) * np.exp(0.5 * rng.standard_normal(requests * samples))
    lengths[rng.random(lengths.size) < 1 / 40] = np.inf
    limit = np.full(requests, 1024, np.int32)
    prompts = SYSTEM + rng.gamma(4.0, 12.5, requests)
    return _workload(prompts, limit, np.full(requests, samples, np.int32), lengths)


def chat(requests: int, samples: int, seed: int) -> Workload:
    """Draws short and long conversations: heavy tails of prompts and answers, limits far above most answers."""
    rng = np.random.default_rng(seed)
    prompts = 300 * np.exp(1.0 * rng.standard_normal(requests))
    short = rng.random(requests * samples) < 0.3
    lengths = np.where(short, 30, 260) * np.exp(np.where(short, 0.6, 0.8) * rng.standard_normal(short.size))
    limit = rng.choice(np.asarray([1024, 2048, 4096], np.int32), requests, p=[0.3, 0.5, 0.2])
    return _workload(np.clip(prompts, 8, 6000), limit, np.full(requests, samples, np.int32), lengths)


def rollouts(requests: int, samples: int, seed: int) -> Workload:
    """Draws rollouts of problems of unequal difficulty: a few samples of most prompts are very long.

    Lengths are log-normal around the prompt's own mean, with a standard deviation of 1.0; max_tokens is 8192.
    """
    rng = np.random.default_rng(seed)
    typical = 250 * np.exp(0.6 * rng.standard_normal(requests))
    lengths = np.repeat(typical, samples) * np.exp(rng.standard_normal(requests * samples))
    limit = np.full(requests, 8192, np.int32)
    prompts = 150 + rng.gamma(4.0, 25.0, requests)
    return _workload(prompts, limit, np.full(requests, samples, np.int32), lengths)


def divide(work: Workload, *, interleaved: bool) -> tuple[Workload, Int32]:
    """Makes a request of each sequence: in the same order, or the first of each request, then the second of each, …

    Returns the workload, and the former request of each of its requests.
    """
    groups = np.repeat(np.arange(work.samples.size, dtype=np.int32), work.samples)
    places = np.arange(groups.size)
    if interleaved:
        places = np.lexsort((groups, places - work.starts[groups]))
    groups = groups[places]
    ones = np.ones(groups.size, np.int32)
    apart = Workload(work.prompt_tokens[groups], work.max_tokens[groups], ones, work.output_tokens[places])
    return apart, groups


def _workload(prompts: Float64, limit: Int32, samples: Int32, lengths: Float64) -> Workload:
    """Caps lengths at the limit."""
    outputs = np.clip(np.ceil(lengths), 1, np.repeat(limit, samples))
    return Workload(prompts.astype(np.int32), limit, samples, outputs.astype(np.int32))
