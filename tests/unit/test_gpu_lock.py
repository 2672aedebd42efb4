from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.fakes.clock import Clock
from toka_async import gpu_lock
from toka_async.gpu_lock import GpuLockError, choose_folder, take_gpu

GPU = "GPU-1b2c"
HOLDER = """
import sys
from toka_async.gpu_lock import take_gpu
take_gpu(*sys.argv[1:])
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(folder: Path, gpu: str = GPU) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a GPU."""
    command = [sys.executable, "-c", HOLDER, gpu, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        yield process
        process.kill()


def test_a_gpu_is_free_when_its_holder_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with another_process(tmp_path) as holder, caplog.at_level(logging.INFO):
        os.close(take_gpu("GPU-another", str(tmp_path)))

        def kill_holder(_seconds: float) -> None:
            holder.kill()
            holder.wait()

        fd = take_gpu(GPU, str(tmp_path), sleep=kill_holder)
    assert caplog.messages == [f"GPU {GPU}: process {holder.pid} uses it; waiting up to 60 s for its end"]
    (path,) = tmp_path.glob(f"*{GPU}*")
    assert path.read_text() == f"{os.getpid()}\n"
    os.close(fd)


def test_the_holder_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    clock = Clock()

    def advance(seconds: float) -> None:
        clock.now += seconds

    with another_process(tmp_path) as holder, pytest.raises(GpuLockError) as raised:
        take_gpu(GPU, str(tmp_path), clock=clock, sleep=advance)
    assert f"GPU {GPU}: process {holder.pid} uses it ({tmp_path}" in str(raised.value)
    assert clock() >= 160


def test_a_gpu_is_locked_after_the_one_that_a_sibling_locks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines that start at once with two GPUs would otherwise each lock one, and wait for the other one."""
    monkeypatch.setattr(os, "getppid", os.getpid)  # so this process's children are its siblings
    held = [take_gpu("GPU-1", str(tmp_path))]  # by another engine
    with ExitStack() as stack:

        def hand_over(_seconds: float) -> None:
            os.close(held.pop())
            stack.enter_context(another_process(tmp_path, "GPU-1"))

        os.close(take_gpu("GPU-2", str(tmp_path), after="GPU-1", sleep=hand_over))
    assert not held


def test_all_users_may_lock_it_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        os.close(take_gpu(GPU, str(tmp_path)))
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o666


def test_what_is_no_lock_is_not_written_to(tmp_path: Path) -> None:
    path, victim = tmp_path / f"toka-async-{GPU}.lock", tmp_path / "victim"
    victim.write_text("important")
    path.symlink_to(victim)
    with pytest.raises(GpuLockError, match="cannot open"):
        take_gpu(GPU, str(tmp_path))
    path.unlink()
    path.hardlink_to(victim)
    with pytest.raises(GpuLockError, match="is not a lock"):
        take_gpu(GPU, str(tmp_path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(GpuLockError, match="is not a lock"):
        take_gpu(GPU, str(tmp_path))
    assert victim.read_text() == "important"


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(GpuLockError, match=f"cannot open {tmp_path}/none/.*: No such file"):
        take_gpu(GPU, str(tmp_path / "none"))


def test_all_users_choose_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, and must not choose a folder for that."""
    monkeypatch.setattr(gpu_lock, "SHARED", tmp_path)
    tmp_path.chmod(0o755)
    assert choose_folder() == Path("/tmp")
    tmp_path.chmod(0o1777)
    assert choose_folder() == tmp_path


def test_a_folder_that_is_read_only_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "SHARED", tmp_path)
    tmp_path.chmod(0o1777)
    values = [*os.statvfs(tmp_path)]
    values[8] |= os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(values))
    assert choose_folder() == Path("/tmp")
