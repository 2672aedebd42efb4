"""The command's files and its bar; the runs themselves are in tests/e2e."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from tests.fakes.terminal import Terminal
from toka_async.batches.disk import StorageError
from toka_async.batches.results import Answered, encode_line
from toka_async.cli import batch_run
from toka_async.cli.batch_run import Bar, BatchFileError, bar_line, make_job, read_progress, run
from toka_async.config import Config, ModelConfig
from toka_async.procs.child import Advanced, BatchJob, Finished, Started
from toka_async.procs.job import open_job


def test_the_files_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    job = make_job(Path("in.jsonl"), Path("out.jsonl"), Path("err.jsonl"), ModelConfig())
    assert job.input == str(tmp_path / "in.jsonl")
    assert job.folder == str(tmp_path / "out.jsonl.progress")


@pytest.mark.parametrize("output", [".", "/", ".."])
def test_an_output_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").touch()
    with pytest.raises(BatchFileError, match="is a folder"):
        make_job(Path("in"), Path(output), None, ModelConfig())


@pytest.mark.parametrize(
    ("source", "output", "errors", "message"),
    [
        ("nothing", "out", "err", "no such file"),
        (".", "out", "err", "no such file"),
        ("in", "in", "err", "three files"),
        ("in", "out", "out", "three files"),
        ("in", "out", "folder/../out", "three files"),
        ("in", "out", "link", "three files"),
        ("in", "folder", "err", "is a folder"),
        ("in", "out", "folder", "is a folder"),
        ("in", "no/out", "err", "no such folder"),
        ("in", "full", "err", "exists already"),
        ("in", "out", "full", "exists already"),
        ("in", "pipe", "err", "is not a file"),
    ],
)
def test_wrong_files(tmp_path: Path, source: str, output: str, errors: str, message: str) -> None:
    (tmp_path / "in").touch()
    (tmp_path / "full").write_text("something")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("out")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BatchFileError, match=message):
        make_job(tmp_path / source, tmp_path / output, tmp_path / errors, ModelConfig())


def test_an_output_that_was_begun_goes_on(tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    (tmp_path / "out").write_text("something")
    (tmp_path / "out.progress").mkdir()
    make_job(tmp_path / "in", tmp_path / "out", tmp_path / "err", ModelConfig())


def test_the_line() -> None:
    none = Advanced(0, 0, 0)
    assert (
        bar_line(Advanced(1500, 0, 6000, 4500), none, 30.0)
        == "[########                      ]  25% 1,500/6,000 lines, 4,500 tokens, 50 lines/s, 150 tokens/s, 1:30 left"
    )
    assert bar_line(Advanced(10, 1, 72010), none, 10.0).endswith(
        "1 failed, 0 tokens, 1 lines/s, 0 tokens/s, 20:00:00 left"
    )
    assert bar_line(none, none, 10.0) == "[##############################] 100% 0/0 lines, 0 tokens"


def test_rates_are_of_this_run_alone_and_of_some_seconds_at_least() -> None:
    before = Advanced(1391, 0, 3000, 10_000)
    assert bar_line(Advanced(1393, 0, 3000, 10_020), before, 0.1).endswith("1,393/3,000 lines, 10,020 tokens")
    assert bar_line(Advanced(1491, 0, 3000, 11_000), before, 10.0).endswith("10 lines/s, 100 tokens/s, 2:31 left")
    assert bar_line(Advanced(3000, 0, 3000, 11_000), before, 1.0).endswith("1,609 lines/s, 1,000 tokens/s")


def test_a_terminal_sees_one_line_that_changes() -> None:
    terminal = Terminal()
    bar = Bar(terminal)
    assert [bar.show(status) for status in (Started(), Advanced(1, 0, 9), Advanced(2, 0, 9))] == [None] * 3
    assert bar.latest.done == 2
    bar.show(Advanced(9, 0, 9))  # the last is always drawn
    assert bar.show(Finished(9, 0)) == 0
    bar.finish()
    first, second = terminal.getvalue().split("\r")[1:]
    assert "1/9 lines" in first
    assert "9/9 lines" in second
    assert second.endswith("\n")


def test_a_narrow_terminal_sees_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    bar = Bar(terminal)
    now += 100.0
    bar.show(Advanced(400, 0, 1500, 37_267))
    (line,) = terminal.getvalue().removeprefix("\r").removesuffix("\x1b[K").split("\r")
    assert len(line) < 80
    assert line.endswith("400/1,500 lines, 37,267 tokens, 4 lines/s, 373 tokens/s, 4:35 left")


def test_elsewhere_lines_come_now_and_then(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first when the rates say something."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    bar = Bar(io.StringIO())
    bar.show(Started())
    for done in range(10, 20):
        bar.show(Advanced(done, 0, 100))
        now += 1.0
    bar.finish()
    assert [line.split()[-2:] for line in capfd.readouterr().err.splitlines()] == [["0:20", "left"]]
    assert batch_run.QUIET_INTERVAL > 10


def test_failed_lines_are_told_by_the_exit_code() -> None:
    bar = Bar(io.StringIO())
    assert bar.show(Finished(5, 2)) == 1


def begin(folder: Path, model: ModelConfig, *failed: bool) -> BatchJob:
    """A job of three lines, of which some are done."""
    (folder / "in").write_bytes(b"".join(b'{"custom_id": "%d"}\n' % number for number in range(3)))
    job = make_job(folder / "in", folder / "out", folder / "err", model)
    opened = open_job(job)
    record, store = opened.record, opened.store
    store.add_batch(record)
    store.accept(record.id, 3, [])
    for number, has_failed in enumerate(failed):
        answered = Answered(str(number), 500 if has_failed else 200, b"{}", output_tokens=7)
        store.finish_lines(record.id, [encode_line(record.id, number, 19 * (number + 1), answered)])
    if len(failed) == 3:
        store.end(record.id, "completed")
        store.finalize(record.id)
    store.close()
    return job


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    job = begin(tmp_path, ModelConfig(), False, True)
    assert read_progress(job, retry=False) == Advanced(2, 1, 3, 14)


@pytest.mark.parametrize(("failed", "code"), [(False, 0), (True, 1)])
def test_a_run_that_is_finished_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], failed: bool, code: int
) -> None:
    begin(tmp_path, ModelConfig(), False, failed, False)
    assert run(Config(), tmp_path / "in", tmp_path / "out", tmp_path / "err") == code
    said = capfd.readouterr().err
    assert f"toka-async: finished already: {3 - failed} lines answered in {tmp_path / 'out'}" in said
    assert ("--retry-failed" in said) == failed


@pytest.mark.parametrize("done", [(False, True, False), (False, True)])
def test_failed_lines_are_asked_again_on_demand(tmp_path: Path, done: tuple[bool, ...]) -> None:
    job = begin(tmp_path, ModelConfig(), *done)
    output = (tmp_path / "out").read_bytes()
    for _ in range(2):
        assert read_progress(job, retry=True) == Advanced(len(done) - 1, 0, 3, 21 - 7 * (3 - len(done)))
    assert (tmp_path / "err").read_bytes() == b""
    opened = open_job(job)
    assert opened.record.status == "in_progress"
    left = opened.store.gaps(opened.record.id)
    assert [(gap.first, gap.stop, gap.offset) for gap in left] == [(1, 2 if len(done) == 3 else 3, 19)]
    opened.store.close()
    assert (tmp_path / "out").read_bytes() == output


@pytest.mark.parametrize(
    "other",
    [
        ModelConfig(path="another"),
        ModelConfig(served_name="another"),
        ModelConfig(load="random"),
        ModelConfig(device="simulated"),
        ModelConfig(dtype="bfloat16"),
    ],
)
def test_a_run_does_not_go_on_with_another_model(tmp_path: Path, other: ModelConfig) -> None:
    begin(tmp_path, ModelConfig(), False)
    with pytest.raises(StorageError, match=r"was begun with model\.\w+='.*', and now it is"):
        read_progress(make_job(tmp_path / "in", tmp_path / "out", tmp_path / "err", other), retry=True)


def test_a_run_goes_on_where_the_same_model_is_named_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    begin(tmp_path, ModelConfig(path=str(tmp_path / "model")), False)
    monkeypatch.chdir(tmp_path)
    job = make_job(Path("in"), Path("out"), Path("err"), ModelConfig(path="model", device="cpu"))
    assert read_progress(job, retry=False) == Advanced(1, 0, 3, 7)


def test_a_run_whose_results_were_taken_away_begins_anew(tmp_path: Path) -> None:
    job = begin(tmp_path, ModelConfig(), False, True, False)
    (tmp_path / "out").unlink()
    with pytest.raises(StorageError, match="out has 0 bytes, but"):
        read_progress(job, retry=False)
    (tmp_path / "err").unlink()
    assert read_progress(job, retry=False) == Advanced(0, 0, 0)


def test_a_run_whose_input_has_changed_does_not_go_on(tmp_path: Path) -> None:
    job = begin(tmp_path, ModelConfig(), False)
    (tmp_path / "in").write_bytes(b"other")
    with pytest.raises(StorageError, match="has changed since"):
        read_progress(job, retry=False)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    (tmp_path / "out.progress").mkdir()
    (tmp_path / "out.progress" / "notes").touch()
    with pytest.raises(BatchFileError, match=r"out\.progress is not empty"):
        run(Config(), tmp_path / "in", tmp_path / "out", None)
    assert [each.name for each in (tmp_path / "out.progress").iterdir()] == ["notes"]
