"""FlashInfer's modules for one model: tells which are missing, and compiles them.

FlashInfer compiles a module when it is first used, for minutes. Each module has a folder with a build file of its own;
loading the module runs ninja there. So a module is missing if ninja would do anything. Compiling several modules by one
build file (`build_jit_specs`) does not help: loading would compile them again, as ninja's log is in another folder.
The package is imported when a function is called.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import msgspec

from toka_async.checkpoint.spec import ModelSpec

TENSOR_CORE_GROUP = 4  # query heads of a key head from which decoding is a matrix product
ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"  # FlashInfer's variable: the GPUs to compile for, such as `9.0a`
_LOOK_SECONDS = 0.5  # between two looks at how far compilers are


class ModuleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the modules of a model depend on.

    architectures: as in `ARCHITECTURES`. dtype, stored: of queries, and of what the cache stores. windowed: whether
    layers without and with a window are there. tensor_cores: whether decoding is a matrix product.
    """

    architectures: str
    dtype: str
    stored: str
    head_dim: int
    windowed: tuple[bool, ...]
    tensor_cores: bool


def make_module_request(spec: ModelSpec, dtype: str, stored: str, architectures: str) -> ModuleRequest:
    """Makes the request for a model, or for a tensor rank's part of it."""
    return ModuleRequest(
        architectures=architectures,
        dtype=dtype,
        stored=stored,
        head_dim=spec.attention.head_dim,
        windowed=tuple(sorted({False, *(window > 0 for window in spec.windows)})),
        tensor_cores=spec.attention.num_heads // spec.attention.num_kv_heads >= TENSOR_CORE_GROUP,
    )


def list_architectures() -> str:
    """Lists the architectures that FlashInfer compiles for here: those of all visible GPUs, or as configured."""
    from flashinfer.jit import current_compilation_context

    return " ".join(f"{major}.{minor}" for major, minor in sorted(current_compilation_context.TARGET_CUDA_ARCHS))


def find_missing(request: ModuleRequest) -> list[Any]:
    """Finds the specs of modules that loading would compile.

    Raises ImportError or RuntimeError if FlashInfer does not work here.
    """
    return [spec for spec in _list_specs(request) if not _is_built(spec)]


def compile_missing(request: ModuleRequest, show: Callable[[int, int], None], num_jobs: int) -> None:
    """Compiles what is missing, all modules at once, with `num_jobs` compilers for each.

    show: (files compiled and linked, all). A module that another process compiles is waited for. Raises RuntimeError
    with the compiler's output.
    """
    specs = find_missing(request)
    if not specs:
        return
    os.environ["MAX_JOBS"] = str(num_jobs)  # which FlashInfer passes to ninja
    with ThreadPoolExecutor(len(specs)) as pool:
        builds = [pool.submit(spec.build, False) for spec in specs]
        while wait(builds, _LOOK_SECONDS).not_done:
            show(*_count_files(specs))
    for build in builds:
        build.result()


def _list_specs(request: ModuleRequest) -> list[Any]:
    import torch
    from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module

    dtype, dim = getattr(torch, request.dtype), request.head_dim
    numbers = (dtype, getattr(torch, request.stored), dtype, torch.int32, dim, dim, 0)
    specs = [gen_cascade_module()]
    for is_windowed in request.windowed:
        options = (is_windowed, False)
        specs += [gen_batch_prefill_module(each, *numbers, *options, False) for each in _list_backends(request)]
        if not request.tensor_cores:
            specs.append(gen_batch_decode_module(*numbers, *options))
    return specs


def _list_backends(request: ModuleRequest) -> list[str]:
    """Lists the backends of prefill: FlashAttention 3 on compute capability 9, where decoding may use the other.

    `WrapperShape.backend` chooses likewise.
    """
    is_plain = request.stored == request.dtype
    backends = {"fa3" if is_plain and each.startswith("9.") else "fa2" for each in request.architectures.split()}
    return sorted(backends | ({"fa2"} if request.tensor_cores else set()))


def _is_built(spec: Any) -> bool:
    """A library may be there and be older than the compiler or the sources, so ninja is asked."""
    if spec.is_aot or not spec.is_compiled:
        return bool(spec.is_aot)
    spec.write_ninja()
    command = ["ninja", "-n", "-C", str(spec.build_dir), "-f", str(spec.ninja_path)]
    return "no work to do" in subprocess.run(command, check=False, capture_output=True, text=True).stdout


def _count_files(specs: Sequence[Any]) -> tuple[int, int]:
    """Counts the objects and libraries that are there, and all."""
    done = sum(len([*spec.build_dir.glob("*.o")]) + spec.is_compiled for spec in specs)
    return done, sum(len(spec.sources) + 1 for spec in specs)
