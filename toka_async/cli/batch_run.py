"""`toka-async batch run`: answers a file of requests, with a bar that shows the progress.

Knows the statuses of processes (`procs.child`), not what a line is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from toka_async.bar import draw_line, format_count, format_duration, get_columns, write_line
from toka_async.batches.disk import StorageError
from toka_async.batches.records import FINAL, Batch
from toka_async.batches.retry import retry_failed
from toka_async.config import Config, ModelConfig
from toka_async.config.text import format_value
from toka_async.launch import run_batch
from toka_async.logs import configure_parent, say
from toka_async.procs.child import Advanced, BatchJob, Finished, Started, Status
from toka_async.procs.job import describe_fault, open_job

INTERVAL, QUIET_INTERVAL = 0.2, 30.0  # seconds between redraws; between lines without a terminal
SETTLED = 3.0  # seconds after which rates are meaningful
ANSWERING = (  # the keys of [model] on which answers depend
    "path",
    "tokenizer",
    "dtype",
    "load",
    "served_name",
    "max_context",
    "generation_config",
    "chat_template",
)


class BatchFileError(Exception):
    """The files cannot be used; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run went. finished: None for one that stopped before its end. pace: how fast it was, for the last line.
    is_new: it did anything that earlier runs had not done."""

    code: int
    finished: Finished | None = None
    pace: str = ""
    is_new: bool = True


def run(config: Config, source: Path, output: Path, errors: Path | None, *, retry: bool = False) -> int:
    """Run the command on a file of OpenAI's batches; returns the exit code: 0 when every line has an answer, 1 when
    some failed or the run was stopped.

    Args:
        retry: ask lines again on which an earlier run failed.

    Raises:
        BatchFileError, ModelError: nothing was begun.
    """
    job = make_job(source, output, errors, config.model)
    tell = configure_parent(config.log.format)
    ran = run_job(config, job, tell, retry=retry)
    if ran.finished is not None:
        tell(describe_end(ran, job.output, f"see {job.errors}"))
    return ran.code


def run_job(config: Config, job: BatchJob, tell: Callable[[str], None], *, retry: bool) -> Ran:
    """Answer the lines that have no answer yet, with a bar. Raises BatchFileError or ModelError."""
    try:
        before = read_progress(job, retry=retry)
    except StorageError as error:
        raise BatchFileError(str(error)) from None
    if isinstance(before, Finished):
        return Ran(exit_code(before), before, is_new=False)
    if before.done:
        tell(f"continuing: {before.done:,} of {before.total:,} lines are done")
    bar = Bar(sys.stderr, tell, before)
    code = run_batch(config, job, bar.show)
    bar.finish()
    if bar.finished is None and code == 0:
        tell(f"stopped after {format_count(bar.latest.done, 'line')}; the same command continues from there")
    return Ran(code if bar.finished else code or 1, bar.finished, bar.pace())


def make_job(source: Path, output: Path, errors: Path | None, model: ModelConfig) -> BatchJob:
    """Check the files. errors: None for a file beside the output. Raises BatchFileError."""
    source, output = source.absolute(), output.absolute()
    if not source.is_file():
        raise BatchFileError(f"--input {source}: no such file")
    if output.is_dir():
        raise BatchFileError(f"--output {output} is a folder")
    errors = (errors or output.with_name(f"{output.stem}.errors{output.suffix}")).absolute()
    folder = output.with_name(f"{output.name}.progress")
    if errors.is_dir():
        raise BatchFileError(f"--errors {errors} is a folder")
    if len({each.resolve() for each in (source, output, errors)}) < 3:
        raise BatchFileError("--input, --output and --errors must be three files")
    for path in (output, errors):
        if not path.parent.is_dir():
            raise BatchFileError(f"{path.parent}: no such folder")
        if path.exists() and not path.is_file():
            raise BatchFileError(f"{path} is not a file; name another")
        if path.exists() and path.stat().st_size and not folder.exists():
            raise BatchFileError(
                f"{path} exists already, without a folder {folder.name} to continue from: remove it or name another"
            )
    return BatchJob(
        input=str(source),
        output=str(output),
        errors=str(errors),
        folder=str(folder),
        model=collect_model_values(model),
    )


def collect_model_values(model: ModelConfig) -> dict[str, str]:
    """The configuration on which answers depend, by key. A run continues only where it is the same."""
    values = {f"model.{name}": format_value(getattr(model, name)) for name in ANSWERING}
    for key in ("model.path", "model.tokenizer", "model.chat_template"):
        if values[key] and Path(values[key]).exists():
            values[key] = str(Path(values[key]).absolute())
    return values | {"model.device": "simulated" if model.device == "simulated" else "one that computes"}


def read_progress(job: BatchJob, *, retry: bool) -> Finished | Advanced:
    """Read what earlier runs have done, and free the folder. Raises BatchFileError or StorageError."""
    if not Path(job.folder).exists():
        return Advanced(0, 0, 0)
    opened = open_job(job)
    with closing(opened.store) as store:
        if opened.begun is None:
            return Advanced(0, 0, 0)
        if opened.record.status == "failed":
            raise BatchFileError(describe_fault(job, opened.begun))
        if retry:
            retry_failed(store, opened.begun)
        return make_status(store.batch(opened.record.id))


def make_status(batch: Batch) -> Finished | Advanced:
    progress = batch.progress
    if batch.record.status in FINAL:
        return Finished(progress.completed, progress.failed, progress.input_tokens, progress.output_tokens)
    done = progress.completed + progress.failed
    return Advanced(done, progress.failed, batch.record.total, progress.output_tokens)


def describe_end(ran: Ran, output: object, where_failed: str) -> str:
    """The last line of a finished run. where_failed: where the user finds what failed."""
    finished = ran.finished
    assert finished is not None
    failed = f"; {finished.failed:,} failed: {where_failed}" if finished.failed else ""
    tokens = f"{finished.prompt_tokens:,} prompt tokens, {finished.tokens:,} generated{ran.pace}"
    text = f"{format_count(finished.completed, 'line')} answered in {output}: {tokens}{failed}"
    if ran.is_new:
        return text
    return f"finished already: {text}{'; --retry-failed retries these' if finished.failed else ''}"


def exit_code(finished: Finished) -> int:
    return 1 if finished.failed else 0


class Bar:
    """The progress of a batch. before: what earlier runs have done. finished: how it ended, None until then."""

    def __init__(self, stream: TextIO, say: Callable[[str], None] = say, before: Advanced | None = None) -> None:
        self._say = say
        self._before = self.latest = before or Advanced(0, 0, 0)
        self.finished: Finished | None = None
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._is_drawn = False
        self._begin()

    def show(self, status: Status) -> int | None:
        """Show a status; returns the exit code with the last one."""
        match status:
            case Started():
                self._begin()
            case Advanced():
                self.latest = status
                self._draw()
            case Finished():
                self.finished = status
                return exit_code(status)
        return None

    def _begin(self) -> None:
        self._began_at = time.monotonic()
        self._next_draw = self._began_at + (0.0 if self._is_terminal else SETTLED)

    def finish(self) -> None:
        if self._is_drawn:
            self._stream.write("\n")
            self._stream.flush()

    def pace(self) -> str:
        """How fast this run was, for its last line."""
        seconds = max(time.monotonic() - self._began_at, 1e-6)
        tokens = self.latest.tokens - self._before.tokens
        return f", {tokens / seconds:,.0f} tokens/s in {format_duration(seconds)}"

    def _draw(self) -> None:
        now, is_last = time.monotonic(), self.latest.done == self.latest.total
        if now < self._next_draw and not is_last:
            return
        self._next_draw = now + (INTERVAL if self._is_terminal else QUIET_INTERVAL)
        line = bar_line(self.latest, self._before, now - self._began_at, get_columns(self._stream))
        if self._is_terminal:
            write_line(self._stream, line)
            self._is_drawn = True
        else:
            self._say(line)


def bar_line(status: Advanced, before: Advanced, seconds: float, columns: int | None = None) -> str:
    """One line of progress, `seconds` after `before`. Rates and the time left count lines since then only."""
    share = status.done / status.total if status.total else 1.0
    failed = f", {status.failed:,} failed" if status.failed else ""
    text = f"{status.done:,}/{status.total:,} lines{failed}, {status.tokens:,} tokens"
    done = status.done - before.done
    if done and (seconds >= SETTLED or status.done >= status.total):
        rate, tokens = done / max(seconds, 1e-6), (status.tokens - before.tokens) / max(seconds, 1e-6)
        left = f", {format_duration((status.total - status.done) / rate)} left" if status.done < status.total else ""
        text += f", {rate:,.0f} lines/s, {tokens:,.0f} tokens/s{left}"
    return draw_line(share, "", text, columns)
