"""A job of Ray Data as a program of its own, so that it can be killed: python -m tests.processes.ray_job FOLDER

It reads FOLDER/in and writes FOLDER/out. FOLDER/computed has the id of each row that an engine began.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from toka_async.ray import data
from toka_async.ray.row_engine import RowEngine

NUM_ROWS = 6000
BAD = 7  # the row whose prompt is out of the vocabulary
BLOCK_ROWS = 200
NUM_TOKENS = 8
STEP_MS = 10


def make_rows(folder: Path) -> None:
    (folder / "in").mkdir()
    prompts = [[10**6] if row == BAD else [row % 500, 2] for row in range(NUM_ROWS)]
    pq.write_table(pa.table({"id": range(NUM_ROWS), "prompt": prompts}), folder / "in" / "rows.parquet")
    (folder / "computed").touch()


def start_job(folder: Path, address: str) -> subprocess.Popen[bytes]:
    """Start the job as a program; its output is in folder/log."""
    command = [sys.executable, "-m", "tests.processes.ray_job", str(folder)]
    environment = {**os.environ, "RAY_ADDRESS": address}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def run_job(folder: Path) -> None:
    """Run the job, or what is left of it, on the cluster of this process. An engine takes the `slot` of its node."""

    class CountedEngine(RowEngine):
        async def __call__(self, batch: pa.Table) -> pa.Table:
            with (folder / "computed").open("a") as file:
                file.write("".join(f"{row}\n" for row in batch["id"].to_pylist()))
            return await super().__call__(batch)

    with mock.patch.object(data, "RowEngine", CountedEngine):
        data.generate(
            ray.data.read_parquet(f"{folder}/in"),
            model="demo",
            id_column="id",
            output=f"{folder}/out",
            samples=2,
            sampling={"max_tokens": NUM_TOKENS, "ignore_eos": True},
            num_cpus=0,
            resources={"slot": 1},
            batch_size=50,
            block_rows=BLOCK_ROWS,
            device="simulated",
            simulated={"step_ms": STEP_MS},
            schedule={"max_seqs": 128},
        )


def list_files(folder: Path) -> set[str]:
    """The files that a job which is killed leaves: those that are also noted as done, which happens later."""
    written, noted = (
        {path.stem.removesuffix("-0") for path in (folder / name).rglob("*.parquet")}
        for name in ("out", "out.checkpoint")
    )
    return written & noted


def count_computed(folder: Path) -> int:
    """Rows that an engine began, those too that it began again."""
    return (folder / "computed").read_text().count("\n")


def check_rows(folder: Path) -> None:
    rows = pq.read_table(folder / "out").to_pylist()
    assert Counter(row["id"] for row in rows) == Counter(range(NUM_ROWS))
    assert not [path for path in folder.rglob("*") if "pending" in path.name]
    for row in rows:
        if row["id"] == BAD:
            assert "out of range" in row["__inference_error__"]
            assert row["generated_text"] == []
        else:
            assert row["__inference_error__"] == ""
            assert row["num_generated_tokens"] == [NUM_TOKENS] * 2
            assert row["finish_reason"] == ["length"] * 2


if __name__ == "__main__":
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.init(log_to_driver=False)
    run_job(Path(sys.argv[1]))
