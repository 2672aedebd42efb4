"""Every kernel that a start builds can be built for, and fits, the GPUs that it may find. No GPU is needed for that.

The cases choose among architectures, shapes and dtypes, so that each appears with some others; `slow` has all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.fakes.offline_gpus import SHARED_MEMORY

Case = tuple[int, str, dict[str, Any]]

BF16, FP16, FP32 = "bfloat16", "float16", "float32"
E4M3 = "float8_e4m3fn"
SMALL = (86, 89, 120)  # with less shared memory than others
LEAST_COPIED = 8  # tokens of a page that the kernel for Hopper chips can copy
QWEN3 = {"hidden": 2048, "inner": 768, "num_experts": 128, "top_k": 8}  # 30B-A3B
QWEN3_5 = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
GPT_OSS = {"hidden": 2880, "inner": 2880, "num_experts": 32, "top_k": 4, "is_clamped": True}
MIXTRAL = {"hidden": 4096, "inner": 14_336, "num_experts": 8, "top_k": 2}
MOST_STACK = 1024  # bytes of a thread for registers that do not suffice
CASES: list[Case] = [  # what takes most shared memory, and each kind of kernel once; compiling all takes minutes
    (86, "attention", {"dtype": BF16, "dim": 256, "group": 7, "page_size": 64}),
    (90, "attention", {"dtype": FP16, "dim": 64, "group": 7, "page_size": 64, "windows": (512,), "has_sinks": True}),
    (86, "attention", {"dtype": BF16, "dim": 512, "group": 8, "soft_cap": 50.0}),
    (86, "invariant", {"dtype": BF16, "dim": 512, "group": 8, "soft_cap": 50.0}),
    # The oldest first: Triton 3.6 converts 8-bit floats for all of a process as it first did, as there is one GPU.
    (89, "quantized", {"dtype": BF16, "hidden": 4096, "inner": 14_336, "by_block": True}),
    (90, "attention", {"dtype": BF16, "dim": 64, "group": 8, "stored": E4M3}),
    (90, "attention", {"dtype": BF16, "dim": 128, "group": 8, "stored": E4M3, "has_sinks": True}),
    (86, "layer", {"dtype": BF16, "dim": 128, "hidden": 4096}),
    (90, "gated", {"dtype": BF16, "hidden": 2048, "inner": 8192}),
    (86, "few rows", {"dtype": BF16, "hidden": 2048, "inner": 8192}),
    (89, "experts", GPT_OSS | {"dtype": BF16}),
    (90, "experts", QWEN3 | {"dtype": BF16, "by_block": True}),
    (120, "sampling", {"dtype": BF16, "vocab": 128_256}),
    (90, "states", QWEN3_5 | {"dtype": BF16}),
    (86, "states", QWEN3_5 | {"dtype": BF16, "key_dim": 192}),
]
EVERY: list[Case] = [
    *(
        (arch, "attention", {"dtype": dtype, "dim": dim, "group": group, "page_size": page_size, "windows": (0, 512)})
        for arch, dtype, dim, (group, page_size) in itertools.product(
            SHARED_MEMORY, (BF16, FP16, FP32), (64, 128, 256, 512), ((1, 1), (4, 16), (7, 16), (8, 64))
        )
    ),
    *(
        (arch, "attention", {"dtype": dtype, "dim": dim, "group": 4, "windows": (0, 512), "stored": E4M3})
        for arch, dtype, dim in itertools.product((89, 90, 100, 120), (BF16, FP16, FP32), (64, 128, 256, 512))
    ),
    *(
        (arch, "attention", {"dtype": dtype, "dim": 256, "group": 2, "windows": (0, 4096), "soft_cap": 50.0})
        for arch, dtype in itertools.product(SHARED_MEMORY, (BF16, FP32))
    ),
    *(
        (arch, "invariant", {"dtype": dtype, "dim": dim, "group": 8})
        for arch, dtype, dim in itertools.product(SHARED_MEMORY, (BF16, FP16, FP32), (64, 128, 256, 512))
    ),
    *(
        (arch, "attention", {"dtype": dtype, "dim": 64, "group": 8, "windows": (0, 128), "has_sinks": True})
        for arch, dtype in itertools.product(SHARED_MEMORY, (BF16, FP16))
    ),
    *(
        (arch, "layer", {"dtype": dtype, "dim": dim, "hidden": hidden})
        for arch, dtype, (dim, hidden) in itertools.product(
            SHARED_MEMORY, (BF16, FP16, FP32), ((64, 896), (128, 8192), (256, 3072))
        )
    ),
    *(
        (arch, "gated", {"dtype": dtype, "hidden": 4096, "inner": 14_336})
        for arch, dtype in itertools.product((90, 100, 120), (BF16, FP16))
    ),
    *((arch, "few rows", {"dtype": BF16, "hidden": 4096, "inner": 14_336}) for arch in SHARED_MEMORY),
    *(
        (arch, "experts", shape | {"dtype": dtype})
        for arch, shape, dtype in itertools.product(SHARED_MEMORY, (QWEN3, MIXTRAL, GPT_OSS), (BF16, FP16))
    ),
    *(
        (arch, "experts", QWEN3 | {"dtype": BF16, "by_block": by_block})
        for arch, by_block in itertools.product((89, 90, 100, 120), (False, True))
    ),
    *(
        (arch, "quantized", {"dtype": dtype, "hidden": hidden, "inner": 2 * hidden, "by_block": by_block})
        for arch, dtype, hidden, by_block in itertools.product(
            (89, 90, 100, 120), (BF16, FP16, FP32), (1024, 8192), (False, True)
        )
    ),
    *(
        (arch, "states", QWEN3_5 | {"dtype": dtype, "stored": stored})
        for arch, (dtype, stored) in itertools.product(
            SHARED_MEMORY, ((BF16, FP32), (FP16, FP32), (FP32, FP32), (BF16, BF16), (FP16, FP16))
        )
    ),
    *(
        (arch, "sampling", {"dtype": dtype, "vocab": 151_936})
        for arch, dtype in itertools.product(SHARED_MEMORY, (BF16, FP16, FP32))
    ),
]


def build(cases: list[Case]) -> list[dict[str, Any]]:
    """Builds in a process without Triton's interpreter. Returns what it says of each case."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.processes.build_kernels"]
    done = subprocess.run(
        command, input=json.dumps(cases), env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(cases: list[Case]) -> None:
    wrong = []
    for (arch, what, arguments), result in zip(cases, build(cases), strict=True):
        expected = "all"
        if what == "attention":  # the best tiles, where there is room for them
            is_large = arguments["dim"] > 128 and arguments["dtype"] != FP32
            expected = "tiles 1" if arch in SMALL and is_large else "tiles 0"
            is_hopper = arch == 90 and arguments["dim"] <= 256 and arguments["dtype"] != FP32
            is_hopper &= not arguments.get("soft_cap")
            if is_hopper and arguments.get("page_size", 16) >= LEAST_COPIED:
                is_e4m3 = "stored" in arguments  # only heads of 64 are then widened meanwhile, larger ones before
                expected = "tiles 0" if is_e4m3 and arguments["dim"] > 64 else "tiles for Hopper"
                expected += " and wide pages" if is_e4m3 else ""
        elif what == "experts":
            of_16_bits = "6 tiles" if arch in SMALL else "7 tiles"
            expected = {None: of_16_bits, True: "3 tiles", False: "4 tiles"}[arguments.get("by_block")]
        elif what == "few rows":
            expected = "5 tiles" if arch in SMALL else "6 tiles"
        elif what == "gated":
            expected = "0 tiles" if arch in SMALL else "2 tiles"
        name = f"sm{arch} {what} {arguments}"
        if result["built"] != expected:
            wrong.append(f"{name}: {result['built']}, expected {expected}")
        wrong += [f"{name}: {kernel}" for kernel in result["kernels"] if kernel["stack"] > MOST_STACK]
    assert not wrong, "\n".join(wrong)


def test_kernels_fit_every_architecture() -> None:
    """A kernel that needs more shared memory than there is cannot be loaded, so that a start finds smaller tiles."""
    check(CASES)


def test_older_gpus_convert_no_e4m3() -> None:
    """So a start refuses them (`LEAST_E4M3`)."""
    (result,) = build([(86, "attention", {"dtype": BF16, "dim": 64, "group": 4, "stored": E4M3})])
    assert "fp8e4nv not supported in this architecture" in result["built"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_all_shapes_fit(arch: int) -> None:
    check([case for case in EVERY if case[0] == arch])
