"""Compiles the product of few rows for a GPU that need not be here; prints its PTX. Without Triton's interpreter."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from toka_async.kernels.few_rows import FewRowsTile, _product
from toka_async.tuning.few_rows import TILES


def compile_tile(architecture: int, tile: FewRowsTile) -> str:
    product, pdl = _product.kernel, architecture >= 90
    constants: dict[str, Any] = {
        "scales": None,
        "block_stride": 0,
        "block": 128,
        "bias": None,
        "n": 2048,
        "k": 2048,
        "finish": "silu",
        "has_bias": False,
        "has_norm": True,
        "rows": tile.rows,
        "columns": tile.columns,
        "depth": tile.depth,
        "stages": tile.num_stages,
        "ahead": tile.num_ahead,
        "pdl": pdl,
        "fetched": 64,
    }
    kinds = {"num_rows": "i32", "eps": "fp32"}
    names = [param.name for param in product.params]
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in names}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name] == "*bf16"}
    source = ASTSource(product, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": tile.num_warps, "launch_pdl": pdl}
    text: str = triton.compile(source, GPUTarget("cuda", architecture, 32), options).asm["ptx"]
    return text


if __name__ == "__main__":
    print(compile_tile(int(sys.argv[1]), TILES[int(sys.argv[2])]))
