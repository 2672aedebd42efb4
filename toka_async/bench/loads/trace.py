"""Lengths of chat requests: from a CSV file such as the public Azure LLM inference traces, or drawn like them.

Knows no tokens and no server.
"""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path

from toka_async.bench.loads.served import BenchError
from toka_async.bench.loads.texts import open_text

COLUMNS = ("ContextTokens", "GeneratedTokens")
# Mean and deviation of the lengths' logarithms in the conversation trace of 2023, and its largest length
# (github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv).
FITS = ((6.63, 0.985, 14050), (5.02, 0.859, 1000))

Lengths = list[tuple[int, int]]  # (prompt tokens, output tokens) of each request


def read_trace(path: Path, num_requests: int) -> Lengths:
    """Reads the first requests of a trace, plain or .gz, in order; each generates at least one token.

    Raises BenchError, which names line and column, for an unreadable or too short file or a wrong row.
    """
    lengths: Lengths = []
    with open_text(path) as file:
        rows = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise BenchError(f"{path}: line 1: no column {missing[0]!r}")
        for row in itertools.islice(rows, num_requests):
            prompt, output = (_length(path, rows.line_num, name, row[name]) for name in COLUMNS)
            lengths.append((max(prompt, 1), max(output, 1)))
    if len(lengths) < num_requests:
        raise BenchError(f"--requests {num_requests}: {path} has {len(lengths)}")
    return lengths


def draw_trace(num_requests: int, draw: random.Random) -> Lengths:
    """Draws log-normal lengths, prompt and output independent (their correlation in the trace is 0.09)."""
    return [
        (_draw_length(draw, *FITS[0]), _draw_length(draw, *FITS[1]))
        for _ in range(num_requests)
    ]  # fmt: skip


def _draw_length(draw: random.Random, mean: float, deviation: float, longest: int) -> int:
    return min(max(round(draw.lognormvariate(mean, deviation)), 1), longest)


def _length(path: Path, line: int, name: str, text: str | None) -> int:
    if text is None or not text.isdigit():
        raise BenchError(f"{path}: line {line}: {name}: expected a number from 0, got {text!r}")
    return int(text)
