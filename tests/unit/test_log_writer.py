from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from toka_async.log_writer import MOST_BYTES, LogWriter

LINE = "x" * 999


class Pipe:
    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.got = b""

    def read_to(self, mark: bytes) -> list[bytes]:
        """Reads until the mark has come; all lines up to now."""
        while mark not in self.got:
            self.got += os.read(self.read_fd, 1 << 20)
        return self.got.splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    for fd in (made.read_fd, made.write_fd):
        try:
            os.close(fd)
        except OSError:  # the test has closed it
            continue


def test_lines_come_in_order(pipe: Pipe) -> None:
    writer = LogWriter(pipe.write_fd)
    for number in range(1000):
        writer.put(str(number))
    assert pipe.read_to(b"\n999\n") == [str(number).encode() for number in range(1000)]
    assert writer.flush(60)


def test_lines_of_several_threads_are_whole(pipe: Pipe) -> None:
    writer = LogWriter(pipe.write_fd)

    def put(line: str) -> None:
        for _ in range(100):
            writer.put(line)

    threads = [threading.Thread(target=put, args=(c * 500,)) for c in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.put("end")
    lines = pipe.read_to(b"\nend\n")
    assert sorted(set(lines)) == [*(c.encode() * 500 for c in "abcd"), b"end"]
    assert len(lines) == 401


def test_a_reader_that_takes_nothing_stops_nobody(pipe: Pipe) -> None:
    """What does not fit is dropped, and the reader is told how much when it is back."""
    writer = LogWriter(pipe.write_fd, lambda count: f"{count} lost")
    num_lines = 3 * MOST_BYTES // 1000
    for _ in range(num_lines):
        writer.put(LINE)
    assert not writer.flush(0.001)
    assert not writer.flush(1e9)  # it is known to be stuck: nobody waits again
    lines = pipe.read_to(b" lost\n")
    num_lost = int(lines.pop().split()[0])
    assert lines == [LINE.encode()] * (num_lines - num_lost)
    assert num_lost >= num_lines - (MOST_BYTES + (1 << 16)) // 1000 - 1
    writer.put("and on")
    assert pipe.read_to(b"and on\n")
    assert writer.flush(60)


def test_a_reader_that_is_gone(pipe: Pipe) -> None:
    writer = LogWriter(pipe.write_fd, lambda count: f"{count} lost")
    os.close(pipe.read_fd)
    for _ in range(10):
        writer.put(LINE)
    assert writer.flush(60)


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_fd, False)
    writer = LogWriter(pipe.write_fd)
    for _ in range(200):
        writer.put(LINE)
    writer.put("end")
    assert len(pipe.read_to(b"\nend\n")) == 201


def test_text_that_is_not_unicode(pipe: Pipe) -> None:
    LogWriter(pipe.write_fd).put("a\ud800b")
    assert pipe.read_to(b"\n") == [rb"a\ud800b"]
