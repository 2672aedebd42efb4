"""A job of Ray Data that loses its driver and an engine, on a Ray cluster of one node."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from tests.drivers.until import wait_until
from tests.processes.ray_job import run_job, start_job
from toka_async.bench.loads.served import list_children

# It takes more than a minute: two starts of the cluster, and a wait for the engine that was killed.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROWS, BAD = 400, 7  # BAD: the row whose prompt is out of the vocabulary
SECONDS = 240.0


def list_files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def find_rank(folder: Path) -> int:
    """The simulated rank of the engine that writes into the folder: there is no other engine of these."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().split(b"\0")
            environment = (command.parent / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if b"serve" in words and f"TOKA_TEST={folder}".encode() in environment:
            return list_children(int(command.parent.name)).get("rank-0-0", 0)
    return 0


def test_a_job_that_is_killed_goes_on_and_each_row_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_TEST", str(tmp_path))  # engines inherit it
    # CPUs are what Ray counts: reading, the filter of rows that are done, and engines each take some.
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    address = str(ray.get_runtime_context().gcs_address)
    try:
        (tmp_path / "in").mkdir()
        prompts = [[ROWS + 10**6] if row == BAD else [row, 2] for row in range(ROWS)]
        pq.write_table(pa.table({"id": range(ROWS), "prompt": prompts}), tmp_path / "in" / "rows.parquet")
        out = tmp_path / "out"

        def tell() -> str:
            return (tmp_path / "log").read_text()[-5000:]

        first = start_job(tmp_path, address)
        wait_until(lambda: len(list_files(out)) >= 2, tell, SECONDS)
        first.send_signal(signal.SIGKILL)
        first.wait()
        written = list_files(out)

        with ThreadPoolExecutor(1) as thread:
            second = thread.submit(run_job, tmp_path)
            wait_until(lambda: len(list_files(out)) > len(written) or second.done(), tell, SECONDS)
            os.kill(wait_until(lambda: find_rank(tmp_path), tell), signal.SIGKILL)
            assert second.result() == ROWS
        files = list_files(out)
        assert run_job(tmp_path) == ROWS
        assert list_files(out) == files, "there was nothing left to compute"
        assert not [name for name in list_files(tmp_path) if "pending" in name]
        check_rows(pq.read_table(out).to_pylist())
    finally:
        ray.shutdown()


def check_rows(rows: list[dict[str, object]]) -> None:
    assert Counter(row["id"] for row in rows) == Counter(range(ROWS))
    for row in rows:
        if row["id"] == BAD:
            assert "out of range" in str(row["__inference_error__"])
            assert row["generated_text"] == []
        else:
            assert row["__inference_error__"] == ""
            assert row["num_generated_tokens"] == [8, 8]
            assert row["finish_reason"] == ["length", "length"]
