"""The command's files and its bar; the runs themselves are in tests/e2e."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from toka_async import batch_run
from toka_async.batch_run import Bar, BatchError, bar_line, make_job
from toka_async.procs.child import Advanced, Finished, Started


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_files_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    job = make_job(Path("in.jsonl"), Path("out.jsonl"), Path("err.jsonl"))
    assert job.input == str(tmp_path / "in.jsonl")
    assert job.folder == str(tmp_path / "out.jsonl.progress")


@pytest.mark.parametrize("output", [".", "/", ".."])
def test_an_output_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").touch()
    with pytest.raises(BatchError, match="that is a folder"):
        make_job(Path("in"), Path(output), None)


@pytest.mark.parametrize(
    ("source", "output", "errors", "message"),
    [
        ("nothing", "out", "err", "no such file"),
        (".", "out", "err", "no such file"),
        ("in", "in", "err", "three files"),
        ("in", "out", "out", "three files"),
        ("in", "out", "folder/../out", "three files"),
        ("in", "out", "link", "three files"),
        ("in", "folder", "err", "that is a folder"),
        ("in", "out", "folder", "that is a folder"),
        ("in", "no/out", "err", "no such folder"),
        ("in", "full", "err", "is there already"),
        ("in", "out", "full", "is there already"),
    ],
)
def test_wrong_files(tmp_path: Path, source: str, output: str, errors: str, message: str) -> None:
    (tmp_path / "in").touch()
    (tmp_path / "full").write_text("something")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("out")
    with pytest.raises(BatchError, match=message):
        make_job(tmp_path / source, tmp_path / output, tmp_path / errors)


def test_an_output_that_was_begun_goes_on(tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    (tmp_path / "out").write_text("something")
    (tmp_path / "out.progress").mkdir()
    make_job(tmp_path / "in", tmp_path / "out", tmp_path / "err")


def test_the_line() -> None:
    assert (
        bar_line(Advanced(1500, 0, 6000), 50.0)
        == "[########                      ]  25% 1,500/6,000 lines, 50/s, 1:30 left"
    )
    assert bar_line(Advanced(1, 1, 7201), 1.0).endswith("1/7,201 lines, 1 failed, 1/s, 2:00:00 left")
    assert bar_line(Advanced(0, 0, 0), 0.0).startswith("[##############################] 100% 0/0 lines, 0/s")


def test_a_terminal_sees_one_line_that_changes() -> None:
    terminal = Terminal()
    bar = Bar(terminal)
    assert [bar.show(status) for status in (Started(), Advanced(1, 0, 9), Advanced(2, 0, 9))] == [None] * 3
    assert bar.done == 2
    bar.show(Advanced(9, 0, 9))  # the last is always drawn
    assert bar.show(Finished(9, 0)) == 0
    bar.finish()
    first, second = terminal.getvalue().split("\r")[1:]
    assert "1/9 lines" in first
    assert "9/9 lines" in second
    assert second.endswith("\n")


def test_elsewhere_lines_come_now_and_then(capfd: pytest.CaptureFixture[str]) -> None:
    bar = Bar(io.StringIO())
    for done in range(1, 10):
        bar.show(Advanced(done, 0, 100))
    bar.finish()
    assert capfd.readouterr().err.count("lines") == 1
    assert batch_run.QUIET_INTERVAL > 1


def test_failed_lines_are_told_by_the_exit_code() -> None:
    bar = Bar(io.StringIO())
    assert bar.show(Finished(5, 2)) == 1
