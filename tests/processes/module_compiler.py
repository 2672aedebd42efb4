"""`startup.module_compiler` with a compiler that does what its first argument says, instead of FlashInfer's.

`python -m tests.processes.module_compiler start FOLDER` starts one that hangs, as a rank does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from toka_async.attention.modules import ModuleRequest
from toka_async.startup.module_compiler import CompilerJob, ModuleCompilation, run_job

REQUEST = ModuleRequest(
    architectures="9.0a", dtype="bfloat16", stored="bfloat16", head_dim=64, windowed=(False,), tensor_cores=True
)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tests.processes.module_compiler", *words]


def compile_modules(request: ModuleRequest, show: Callable[[int, int], None], num_jobs: int) -> None:
    """`work FOLDER` writes what it was told; `fail` raises; `crash` dies; `hang FOLDER` has a program that hangs."""
    assert request == REQUEST
    match sys.argv[1:]:
        case ["work", folder]:
            for done in range(3):
                show(done, 3)
            words = (os.environ["FLASHINFER_CUDA_ARCH_LIST"], num_jobs, os.nice(0))
            Path(folder, "told").write_text(" ".join(map(str, words)))
        case ["fail"]:
            raise RuntimeError("Ninja build failed. Ninja output:\n[1/2] nvcc\na.cu: error: too new")
        case ["crash"]:
            os._exit(7)
        case ["hang", folder]:
            program = subprocess.Popen(["sleep", "1000"])
            unfinished = Path(folder, "unfinished")
            unfinished.write_text(f"{os.getpid()} {program.pid}")
            unfinished.rename(Path(folder, "pids"))
            program.wait()


if __name__ == "__main__":
    if sys.argv[1] == "start":
        ModuleCompilation(CompilerJob(REQUEST, 1), command("hang", sys.argv[2]))
        time.sleep(1000)
    sys.exit(run_job(compile_modules))
