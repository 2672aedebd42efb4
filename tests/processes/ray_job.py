"""A job of Ray Data as a program of its own, so that it can be killed: python -m tests.processes.ray_job FOLDER"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import ray

from toka_async.ray.data import generate

STEP_MS = 40


def start_job(folder: Path, address: str) -> subprocess.Popen[bytes]:
    """Start the job as a program. It reads folder/in and writes folder/out; its output is in folder/log."""
    command = [sys.executable, "-m", "tests.processes.ray_job", str(folder)]
    environment = {**os.environ, "RAY_ADDRESS": address}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def run_job(folder: Path) -> int:
    """Run the job, or what is left of it, on the cluster of this process; returns how many rows there are."""
    ds = generate(
        ray.data.read_parquet(f"{folder}/in"),
        model="demo",
        id_column="id",
        output=f"{folder}/out",
        samples=2,
        sampling={"max_tokens": 8, "ignore_eos": True},
        num_cpus=0.5,
        batch_size=8,
        block_rows=40,
        device="simulated",
        simulated={"step_ms": STEP_MS},
        schedule={"max_seqs": 32},
    )
    rows: int = ds.count()
    return rows


if __name__ == "__main__":
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.init(log_to_driver=False)
    run_job(Path(sys.argv[1]))
