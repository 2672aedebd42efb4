"""Result files that somebody else cuts short or removes: the batch fails, and what is left of them can be read."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path

import pytest

from toka_async.batches.damage import BLOCK, count_whole_lines
from toka_async.batches.disk import StorageError
from toka_async.batches.records import Batch, BatchRecord, DoneLine, Fault, FileRecord
from toka_async.batches.store import NotFoundError, Store

TOTAL = 5
RECORD = BatchRecord(
    id="b", endpoint="/v1/completions", input_file_id="in", output_id="out", error_id="err", created_at=1
)
LOST = Fault(code="input_file_unreadable", message="gone")


def begun(folder: Path, empty: Container[str] = ()) -> Store:
    """A batch of which lines 0 to 2 are in the output file, and line 3 is in the error file, unless they are empty."""
    store = Store(folder, lambda: 1000)
    upload = store.folder.uploads / "one"
    upload.write_bytes(b"x")
    store.add_file(FileRecord(id="in", filename="in", purpose="batch", bytes=1, created_at=1), upload)
    store.add_batch(RECORD)
    store.accept("b", TOTAL, ())
    lines = {"out": [done(0), done(1), done(2)], "err": [done(3, failed=True)]}
    store.finish_lines("b", [line for name, each in lines.items() if name not in empty for line in each])
    return store


def done(line: int, failed: bool = False) -> DoneLine:
    return DoneLine(line=line, end=line + 1, failed=failed, data=b"line %d\n" % line, output_tokens=1)


def another_line(store: Store) -> Batch:
    return store.finish_lines("b", [done(4)])


def end(store: Store) -> Batch:
    store.end("b", "completed")
    return store.finalize("b")


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    """In the middle of a line."""
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("notice", [another_line, end])
@pytest.mark.parametrize(("damage", "num_left"), [(remove, 0), (cut, 14), (empty, 0)])
def test_an_output_file_is_damaged(
    tmp_path: Path, notice: Callable[[Store], Batch], damage: Callable[[Path], None], num_left: int
) -> None:
    store = begun(tmp_path)
    written = 21
    if notice is end:
        another_line(store)  # the last one
        written, num_left = 28, num_left and 21
    damage(store.path("out"))
    store.database.connection.execute("BEGIN")
    batch = notice(store)
    store.database.connection.execute("COMMIT")
    store.after_commit()
    assert (batch.record.status, batch.record.failed_at) == ("failed", 1000)
    (fault,) = batch.record.faults
    assert (fault.code, fault.param) == ("output_file_damaged", "output_file_id")
    assert f"(out) has {0 if damage is not cut else written - 3} bytes of {written}" in fault.message
    assert (batch.progress.output_bytes, batch.progress.error_bytes) == (num_left, 7)
    check_after(store, num_left)
    store.close()
    store = Store(tmp_path, lambda: 1000)  # finds it as it was left
    assert store.batch("b") == batch
    assert not store.unfinished
    check_after(store, num_left)
    store.close()


def check_after(store: Store, num_left: int) -> None:
    """Whole lines are a file, nothing at all is none; what comes later changes nothing."""
    batch = store.batch("b")
    assert another_line(store) == store.finalize("b") == store.fail("b", LOST) == store.end("b", "cancelled") == batch
    assert store.path("err").read_bytes() == b"line 3\n"
    assert store.file("err").bytes == 7
    if num_left:
        assert store.file("out").bytes == num_left
        assert store.path("out").read_bytes() == b"line 0\nline 1\nline 2\nline 3\n"[:num_left]
    else:
        assert not store.path("out").exists()
        with pytest.raises(NotFoundError):
            store.file("out")


def test_both_files_are_damaged_and_the_input_is_lost(tmp_path: Path) -> None:
    store = begun(tmp_path)
    cut(store.path("out"))
    remove(store.path("err"))
    batch = store.fail("b", LOST)
    codes = [fault.code for fault in batch.record.faults]
    assert codes == ["input_file_unreadable", "output_file_damaged", "error_file_damaged"]
    assert (batch.progress.output_bytes, batch.progress.error_bytes) == (14, 0)
    assert (batch.progress.completed, batch.progress.failed) == (3, 1)
    store.close()


def test_what_was_not_committed_may_be_gone(tmp_path: Path) -> None:
    store = begun(tmp_path)
    with store.path("out").open("ab") as file:
        file.write(b"and more, than somebody might cut off")
    assert another_line(store).record.status == "in_progress"
    assert store.path("out").read_bytes() == b"line 0\nline 1\nline 2\nline 4\n"
    store.close()


def test_a_file_that_is_still_empty_is_made_again(tmp_path: Path) -> None:
    store = begun(tmp_path, {"out"})
    remove(store.path("out"))
    assert another_line(store).progress.completed == 1
    assert store.path("out").read_bytes() == b"line 4\n"
    store.close()


def test_a_folder_that_is_gone_says_nothing_of_its_files(tmp_path: Path) -> None:
    store = begun(tmp_path)
    (tmp_path / "files").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="No such file"):
        another_line(store)
    assert store.batch("b").record.status == "in_progress"
    (tmp_path / "elsewhere").rename(tmp_path / "files")
    assert another_line(store).progress.completed == 4
    store.close()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_whole_lines_of_any_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    for text, expected in (
        (b"", (0, 0)),
        (b"a" * size, (0, 0)),
        (b"a\n" + b"b" * size, (2, 1)),
        (b"a" * size + b"\n", (size + 1, 1)),
        (b"a\n" + b"b" * size + b"\nc", (size + 3, 2)),
    ):
        path.write_bytes(text)
        assert count_whole_lines(path) == expected
