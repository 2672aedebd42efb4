"""A batch on a disk that fills up, in a process that is killed and a machine that loses power: nothing is lost.

Every step that changes the disk is a place to fail at. A power cut leaves of unsynced bytes what chance leaves.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toka_async.batches.disk import Disk, StorageError
from toka_async.batches.lines import read_lines
from toka_async.batches.records import FINAL, Batch, BatchRecord, DoneLine, FileRecord
from toka_async.batches.store import Store
from toka_async.batches.writer import Transactions, WriteTask

T = TypeVar("T")


class Crash(BaseException):
    """The process is gone."""


class FailingDisk(Disk):
    """`fail` is called at every step. Remembers how much of each file is safe."""

    def __init__(self, fail: Callable[[], None]) -> None:
        super().__init__(lambda _step: fail())
        self.safe: dict[Path, int] = {}
        self.fail = fail
        self.torn = Random(0)

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        half = self.torn.randrange(len(data) + 1)
        super().write(fd, data[:half], offset)
        self.fail()
        super().write(fd, data[half:], offset + half)

    def append(self, path: Path, length: int, data: bytes) -> None:
        super().append(path, length, data)
        self.safe[path] = length + len(data)

    def cut_power(self) -> None:
        """Bytes that were never synced are lost, some or all."""
        for path, length in self.safe.items():
            with suppress(FileNotFoundError):
                os.truncate(path, self.torn.randint(min(length, path.stat().st_size), path.stat().st_size))


class FailingConnection:
    """A connection that does not come to commit, or that nobody hears of it."""

    def __init__(self, connection: sqlite3.Connection, fail: Callable[[], None]) -> None:
        self.connection = connection
        self.fail = fail

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    def execute(self, statement: str) -> None:
        if statement == "COMMIT":
            try:
                self.fail()
            except OSError:
                raise sqlite3.OperationalError("database or disk is full") from None
        self.connection.execute(statement)
        if statement == "COMMIT":
            with suppress(OSError):
                self.fail()


class Machine:
    """A store that is opened again after every crash."""

    def __init__(self, folder: Path, faults: dict[int, str], seed: int) -> None:
        self.folder = folder
        self.faults = faults  # by step, counted over all lives
        self.num_steps = 0
        self.random = Random(seed)
        self.disk = FailingDisk(self._step)
        self.store: Store
        self.transactions: Transactions
        self._open()

    def _step(self) -> None:
        self.num_steps += 1
        match self.faults.get(self.num_steps):
            case "crash":
                raise Crash
            case "full":
                raise OSError(errno.ENOSPC, "no space left on device")

    def _open(self) -> None:
        while True:
            self.disk.torn = self.random
            try:
                self.store = Store(self.folder, lambda: 1000, self.disk)
            except (Crash, StorageError):
                continue
            connection = cast(sqlite3.Connection, FailingConnection(self.store.database.connection, self._step))
            self.transactions = Transactions(connection, self.store.after_commit, self.store.forget)
            return

    def close(self) -> None:
        self.store.close()

    def run(self, work: Callable[[Store], T], again: bool = True) -> T | None:
        """The result; None after a crash, when it may have been done or not. On a full disk it is done `again`."""
        while True:
            job = WriteTask(lambda: work(self.store))
            try:
                self.transactions.do([job])
            except Crash:
                self.store.close()
                if self.random.random() < 0.5:
                    self.disk.cut_power()
                self._open()
                return None
            if isinstance(job.error, StorageError):
                if again:  # there is room by now
                    continue
                return None
            if job.error is not None:
                raise job.error
            result: T = job.result
            return result


NAME = "batch_1"
RECORD = BatchRecord(
    id=NAME,
    endpoint="/v1/completions",
    input_file_id="file-in",
    output_id="file-out",
    error_id="file-err",
    created_at=1,
)


def put_input(machine: Machine, total: int) -> Path:
    """The input file, uploaded."""
    text = "".join(json.dumps({"custom_id": f"c{line}"}) + "\n\n" for line in range(total)).encode()
    file = FileRecord(id="file-in", filename="in", purpose="batch", bytes=len(text), created_at=1)
    upload = machine.store.folder.uploads / "one"
    while machine.store.database.file("file-in") is None:
        upload.write_bytes(text)
        machine.run(lambda store: store.add_file(file, upload), again=False)
    return machine.store.path("file-in")


def work_on(machine: Machine, path: Path, random: Random) -> None:
    """What a runner does after a start, until a crash: lines in any order, in groups of any size."""
    batch = machine.run(lambda store: store.batch(NAME))
    if batch is not None and batch.record.status == "validating":
        batch = machine.run(lambda store: store.accept(NAME, TOTAL, ()))
    if batch is None or batch.record.status != "in_progress":
        return finish(machine, batch)
    gaps = machine.run(lambda store: store.gaps(NAME))
    if gaps is None:
        return None
    lines = []
    for gap in gaps:
        found = read_lines(path, gap.offset, gap.stop - gap.first, 1 << 20)
        lines += [(gap.first + place, line) for place, line in enumerate(found)]
    random.shuffle(lines)
    while lines:
        taken, lines = lines[:3], lines[3:]
        done = [
            DoneLine(line=number, end=line.end, failed=number % 3 == 0, data=line.raw + b"\n") for number, line in taken
        ]
        if machine.run(lambda store, done=done: store.finish_lines(NAME, done)) is None:  # type: ignore[misc]
            return None
    return finish(machine, machine.run(lambda store: store.end(NAME, "completed")))


def finish(machine: Machine, batch: Batch | None) -> None:
    if batch is not None and batch.record.status not in FINAL:
        machine.run(lambda store: store.finalize(NAME))


TOTAL = 8
Faults = dict[int, str]


def check(folder: Path, faults: Faults, seed: int) -> int:
    """Runs a batch to its end through all faults; the number of steps."""
    shutil.rmtree(folder, ignore_errors=True)
    with closing(Machine(folder, faults, seed)) as machine:
        run_batch(machine, Random(seed))
    Store(folder, lambda: 1000).close()
    assert {each.name for each in (folder / "files").iterdir()} == {"file-in", "file-out", "file-err"}
    assert not list((folder / "uploads").iterdir())
    return machine.num_steps


def run_batch(machine: Machine, random: Random) -> None:
    """Runs a batch to its end, and checks that no line is lost or written twice."""
    path = put_input(machine, TOTAL)
    while machine.store.database.batch(NAME) is None:
        machine.run(lambda store: store.add_batch(RECORD))
    for _ in range(100):
        if machine.store.batch(NAME).record.status not in FINAL:
            work_on(machine, path, random)
    batch = machine.store.batch(NAME)
    assert batch.record.status == "completed"
    assert (batch.progress.completed, batch.progress.failed) == (5, 3)
    ids = {}
    for file_id in ("file-out", "file-err"):
        data = machine.store.path(file_id).read_bytes()
        assert machine.store.file(file_id).bytes == len(data)
        ids[file_id] = Counter(json.loads(line)["custom_id"] for line in data.splitlines())
    assert ids["file-out"] == Counter(f"c{line}" for line in (1, 2, 4, 5, 7))
    assert ids["file-err"] == Counter(f"c{line}" for line in (0, 3, 6))


def test_one_fault_at_every_step(tmp_path: Path) -> None:
    num_steps = check(tmp_path / "store", {}, 0)
    assert num_steps > 20
    for step in range(1, num_steps + 1):
        for kind in ("crash", "full"):
            check(tmp_path / "store", {step: kind}, step)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.integers(1, 80), st.sampled_from(["crash", "full"]), max_size=12), st.integers(0, 1000))
def test_many_faults(tmp_path_factory: pytest.TempPathFactory, faults: Faults, seed: int) -> None:
    check(tmp_path_factory.getbasetemp() / "many", faults, seed)


def test_the_test_sees_a_wrong_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that are committed although the bytes never reached the disk."""

    def append(self: FailingDisk, path: Path, length: int, data: bytes) -> None:
        self.safe.setdefault(path, 0)
        with path.open("r+b") as file:
            file.truncate(length)
            file.seek(length)
            file.write(data)
        self.fail()

    monkeypatch.setattr(FailingDisk, "append", append)
    wrong = 0
    for step in range(1, 40):
        with suppress(Exception):
            check(tmp_path / "store", {step: "crash"}, step)
            continue
        wrong += 1
    assert wrong
