"""`toka-async ping`: prints one answer as it comes, or some of many samples, their vote and their speed."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TextIO

from toka_async.cli.ping import PingQuestion, PingSamples, Server
from toka_async.cli.vote import count_answers

NUM_SHOWN = 3  # printed samples
NUM_OTHERS = 3  # listed answers beside the most frequent one
LONGEST = 600  # characters of a printed sample
SHORT = 30  # characters of an answer in a list
CLEAR_LINE = "\r\x1b[K"


def ask(server: Server, question: PingQuestion, out: TextIO | None = None) -> None:
    out = out or sys.stdout
    if question.n == 1:
        for piece in server.stream(question):
            out.write(piece)
            out.flush()
        out.write("\n")
        return
    waiting = f"asking for {question.n:,} samples …"
    if out.isatty():
        out.write(waiting)
        out.flush()
    try:
        samples = server.ask_samples(question)
    finally:
        if out.isatty():
            out.write(CLEAR_LINE)
    out.write("\n".join(sample_lines(samples, shutil.get_terminal_size().columns)) + "\n")


def sample_lines(samples: PingSamples, width: int) -> Iterator[str]:
    """The first samples, the vote of all, and their speed."""
    for number, text in enumerate(samples.texts[:NUM_SHOWN], 1):
        yield f"sample {number}"
        yield from _indent(text, width)
    yield ""
    num = len(samples.texts)
    (winner, votes), *others = count_answers(samples.texts)
    tie = [_shorten(answer) for answer, count in others if count == votes]
    yield f"vote   {_shorten(winner)}: {votes:,} of {num:,} samples" + (
        f", as many for {_join_first(tie)}" if tie else ""
    )
    if others:
        counts = (f"{_shorten(answer)}: {count:,}" for answer, count in others)
        yield f"others {_join_first(counts)}"
    yield (
        f"speed  {num:,} samples, {samples.num_tokens:,} tokens in {samples.seconds:.2f} s: "
        f"{samples.num_tokens / max(samples.seconds, 1e-9):,.0f} tokens/s"
    )


def _shorten(answer: str) -> str:
    return f"{answer[:SHORT]}…" if len(answer) > SHORT else answer or "(none)"


def _join_first(items: Iterable[str]) -> str:
    """Join the first few, and count the others."""
    shown = list(items)
    more = len(shown) - NUM_OTHERS
    return ", ".join(shown[:NUM_OTHERS]) + (f", and {more:,} more" if more > 0 else "")


def _indent(text: str, width: int) -> Iterator[str]:
    text = text.strip()
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
    for line in text.splitlines() or [""]:
        yield from textwrap.wrap(line, max(width - 2, 20), initial_indent="  ", subsequent_indent="  ") or [""]
