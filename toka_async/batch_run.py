"""`toka-async batch run`: a file of requests to a file of answers, with a bar that shows how far it is.

Knows the processes by what they say (`procs.child`); what a line is, they know.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from toka_async.config import Config
from toka_async.launch import run_batch
from toka_async.logs import say, speaker
from toka_async.procs.child import Advanced, BatchJob, Finished, Started, Status

WIDTH = 30
INTERVAL, QUIET_INTERVAL = 0.2, 30.0  # seconds between redraws; between lines where there is no terminal


class BatchError(Exception):
    """The files are not as they must be; one line for the user."""


def run(config: Config, source: Path, output: Path, errors: Path | None) -> int:
    """The exit code: 0 when every line has an answer, 1 when some failed or it was stopped before.

    Raises:
        BatchError, ModelError: nothing has begun.
    """
    job = make_job(source, output, errors)
    tell = speaker(config.server.log_format)
    bar = Bar(sys.stderr, tell)
    code = run_batch(config, job, bar.show)
    bar.finish()
    if bar.finished is None:
        if code == 0:
            tell(f"stopped after {bar.done:,} lines; the same command goes on from there")
        return code or 1
    shutil.rmtree(job.folder, ignore_errors=True)
    failed = f", {bar.finished.failed:,} failed: see {job.errors}" if bar.finished.failed else ""
    tell(f"{bar.finished.completed:,} lines answered in {output}{failed}")
    return code


def make_job(source: Path, output: Path, errors: Path | None) -> BatchJob:
    """Raises BatchError. errors: None for a file beside the output."""
    source, output = source.absolute(), output.absolute()
    if not source.is_file():
        raise BatchError(f"--input {source}: no such file")
    if output.is_dir():
        raise BatchError(f"--output {output}: that is a folder")
    errors = (errors or output.with_name(f"{output.stem}.errors{output.suffix}")).absolute()
    folder = output.with_name(f"{output.name}.progress")
    if errors.is_dir():
        raise BatchError(f"--errors {errors}: that is a folder")
    if len({each.resolve() for each in (source, output, errors)}) < 3:
        raise BatchError("--input, --output and --errors must be three files")
    for path in (output, errors):
        if not path.parent.is_dir():
            raise BatchError(f"{path.parent}: no such folder")
        if path.exists() and path.stat().st_size and not folder.exists():
            raise BatchError(f"{path} is there already, and was not begun by this command; remove it or name another")
    return BatchJob(input=str(source), output=str(output), errors=str(errors), folder=str(folder))


class Bar:
    """How far a batch is. finished: how it ended, once it has."""

    def __init__(self, stream: TextIO, say: Callable[[str], None] = say) -> None:
        self._say = say
        self.done = 0
        self.finished: Finished | None = None
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._next_draw = 0.0
        self._began: tuple[float, int] | None = None  # when, and lines that were done then
        self._is_drawn = False

    def show(self, status: Status) -> int | None:
        """A number ends all: the exit code."""
        match status:
            case Started() if self._began is None:
                self._began = (time.monotonic(), self.done)
            case Advanced():
                self.done = status.done
                self._draw(status)
            case Finished():
                self.finished = status
                return 1 if status.failed else 0
        return None

    def finish(self) -> None:
        if self._is_drawn:
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, status: Advanced) -> None:
        now, is_last = time.monotonic(), status.done == status.total
        if now < self._next_draw and not is_last:
            return
        self._next_draw = now + (INTERVAL if self._is_terminal else QUIET_INTERVAL)
        line = bar_line(status, self._rate(now, status.done))
        if self._is_terminal:
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()
            self._is_drawn = True
        else:
            self._say(line)

    def _rate(self, now: float, done: int) -> float:
        """Lines a second since the start."""
        if self._began is None:
            return 0.0
        since, before = self._began
        return (done - before) / max(now - since, 1e-6)


def bar_line(status: Advanced, rate: float) -> str:
    share = status.done / status.total if status.total else 1.0
    bar = "#" * round(WIDTH * share)
    left = f", {_duration((status.total - status.done) / rate)} left" if rate else ""
    failed = f", {status.failed:,} failed" if status.failed else ""
    counts = f"{status.done:,}/{status.total:,} lines{failed}"
    return f"[{bar:<{WIDTH}}] {share:4.0%} {counts}, {rate:,.0f}/s{left}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
