"""Compiles FlashInfer's modules in a process of its own: `python -m toka_async.startup.module_compiler`.

The process gets its job on standard input, and writes to standard output how far it is. The end of its standard input
ends it and all compilers, so it never outlives the process that started it. Knows nothing of what the modules compute.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from toka_async.attention.modules import ModuleRequest
from toka_async.bar import Show, show_nothing

COMMAND = (sys.executable, "-m", "toka_async.startup.module_compiler")
LOWEST_PRIORITY = 19

logger = logging.getLogger(__name__)


class CompilerJob(msgspec.Struct, frozen=True):
    """num_jobs: compilers of each module at the same time. niceness: of the process and its compilers."""

    request: ModuleRequest
    num_jobs: int
    niceness: int = 0


class CompilerProgress(msgspec.Struct, frozen=True, tag=True):
    """Compiler -> starter: files that are compiled, and all."""

    done: int
    total: int


class CompilerFailure(msgspec.Struct, frozen=True, tag=True):
    """Compiler -> starter: it ends, and why."""

    reason: str


_STATUSES: msgspec.json.Decoder[CompilerProgress | CompilerFailure] = msgspec.json.Decoder(
    CompilerProgress | CompilerFailure
)
# Compiles what is missing with so many jobs; is told where to show (done, all).
Compile = Callable[[ModuleRequest, Callable[[int, int], None], int], None]


class ModuleCompilation:
    """A compilation that runs. It ends with this process."""

    def __init__(self, job: CompilerJob, command: Sequence[str] = COMMAND) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # its process group is ended as one, and no terminal's signal reaches it
            env={**os.environ, "FLASHINFER_CUDA_ARCH_LIST": job.request.architectures},  # no need to ask the GPU
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(job) + b"\n")

    def wait(self, show: Show = show_nothing) -> None:
        """Waits until all is compiled. Raises RuntimeError with the reason if that fails."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        reason = ""
        with self.process.stdin, self.process.stdout as statuses:
            for line in statuses:
                status = _STATUSES.decode(line)
                if isinstance(status, CompilerFailure):
                    reason = status.reason
                else:
                    show(status.done, status.total, "files compiled")
        code = self.process.wait()
        if reason or code:
            raise RuntimeError(reason or f"the compiling process ended with exit code {code}")


def compile_now(request: ModuleRequest, show: Show) -> None:
    """Compiles what is missing. Raises RuntimeError with the reason if that fails.

    Each module has a compiler for two cores. Several modules have more compilers than cores, until the small ones end.
    """
    ModuleCompilation(CompilerJob(request, max(1, len(os.sched_getaffinity(0)) // 2))).wait(show)


def compile_in_background(request: ModuleRequest, command: Sequence[str] = COMMAND) -> threading.Thread:
    """Compiles what is missing beside other work, at the lowest priority, and logs the end. Returns the waiting thread.

    Each module has one compiler at a time.
    """

    def follow() -> None:
        try:
            ModuleCompilation(CompilerJob(request, 1, LOWEST_PRIORITY), command).wait()
            logger.info("FlashInfer is compiled: the next start measures where it is faster")
        except (OSError, RuntimeError) as error:
            logger.warning("FlashInfer could not be compiled, so it is not used: %s", error)

    logger.info("FlashInfer is compiled in the background, for some minutes; until then our own kernels serve")
    thread = threading.Thread(target=follow, name="flashinfer", daemon=True)
    thread.start()
    return thread


def run_job(compile_missing: Compile) -> int:
    """Does the job on standard input; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored by ranks, and inherited
    orders, statuses = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    data = b""
    while not data.endswith(b"\n"):
        if not (chunk := os.read(orders, 65536)):
            return 1
        data += chunk
    job = msgspec.json.decode(data, type=CompilerJob)
    threading.Thread(target=_end_with_starter, args=(orders,), name="lifeline", daemon=True).start()
    os.nice(job.niceness)

    def send(status: CompilerProgress | CompilerFailure) -> None:
        os.write(statuses, msgspec.json.encode(status) + b"\n")

    try:
        compile_missing(job.request, lambda done, total: send(CompilerProgress(done, total)), job.num_jobs)
    except Exception as error:  # whatever FlashInfer raises is one line for the starter
        from toka_async.attention.flashinfer import explain_failure

        send(CompilerFailure(explain_failure(error)))
        return 1
    return 0


def _end_with_starter(orders: int) -> None:
    """Ends this process group when the starter ends. Ninja then ends its compilers, which have groups of their own."""
    while os.read(orders, 65536):
        pass
    os.killpg(0, signal.SIGTERM)


def main() -> int:
    from toka_async.attention.modules import compile_missing

    return run_job(compile_missing)


if __name__ == "__main__":
    sys.exit(main())
