"""`toka-async bench products`: times the ways to compute a model's products of few rows, on a GPU.

Each way is captured in a graph of many products, with the weights of one layer after the other, as a step has them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from toka_async.bench.loads.served import BenchError
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.layer_spec import DenseFeedSpec
from toka_async.checkpoint.spec import ModelError, ModelSpec, read_spec
from toka_async.config import Config, load_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from toka_async.kernels.few_rows import FewRowsProducts, FewRowsTile, Norm
    from toka_async.kernels.fused import FusedOps

LEAST_BYTES = 1 << 28  # of the weights that are used in turn: no cache holds them
PRODUCTS = 64  # of a graph, about
REPLAYS = 10


@dataclass(frozen=True, slots=True)
class TimedMatrix:
    """finish: see `kernels.few_rows`. normed: its input is normed first."""

    name: str
    n: int
    k: int
    finish: str
    normed: bool


class ProductTime(msgspec.Struct, frozen=True, kw_only=True):
    """A product by one way, its norm and gate included. gb_s: of reading the weights."""

    matrix: str
    rows: int
    way: str
    us: float
    gb_s: float


def main(options: argparse.Namespace) -> int:
    """Runs and prints; returns the exit code. Raises ConfigError for a wrong override."""
    config = load_config(overrides=options.overrides)
    try:
        times = measure(options.rows, config)
        for each in times:
            print(msgspec.json.encode(each).decode() if options.json else describe_time(each), flush=True)
    except (BenchError, ModelError) as error:
        print(f"toka-async: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def describe_time(time: ProductTime) -> str:
    return f"{time.matrix:<8}{time.rows:>4} rows  {time.us:>8.2f} us  {time.gb_s:>6.0f} GB/s  {time.way}"


def measure(rows: Sequence[int], config: Config) -> Iterator[ProductTime]:
    """Raises ModelError without the model, BenchError where our kernels do not run."""
    spec = read_spec(resolve_model(config.model.path, weights=False))
    from toka_async.startup.device import has_kernels, resolve_device, resolve_dtype

    device = resolve_device(config.model)
    dtype = resolve_dtype(config.model, spec, device)
    if not has_kernels(device):
        raise BenchError("bench products: needs an NVIDIA GPU and Triton")
    import torch

    for matrix in list_matrices(spec, dtype == torch.bfloat16):
        weights = make_weights(matrix, device, dtype)
        for num_rows in rows:
            x = torch.randn(num_rows, matrix.k, device=device, dtype=dtype)
            for way, compute in list_ways(matrix, x, weights):
                us = time_in_graph(partial(compute, x), weights)
                num_bytes = matrix.n * matrix.k * dtype.itemsize
                yield ProductTime(
                    matrix=matrix.name, rows=num_rows, way=way, us=round(us, 2), gb_s=round(num_bytes / us / 1e3, 1)
                )


def list_matrices(spec: ModelSpec, normed: bool) -> list[TimedMatrix]:
    """Lists the matrices of the first layer with a dense feed, or of a layer's attention, and the head."""
    dense = [index for index, layer in enumerate(spec.layers) if isinstance(layer.feed, DenseFeedSpec)]
    qkv, output, *others = spec.list_matrices(dense[0] if dense else 0)
    uses = [
        ("qkv", qkv, "store", normed),
        ("output", output, "add", False),
        ("head", spec.head_matrix, "store", False),
    ]
    if dense:
        gate_up, down = others
        feed = spec.layers[dense[0]].feed
        assert isinstance(feed, DenseFeedSpec)
        uses[2:2] = [("gate_up", gate_up, feed.activation, normed), ("down", down, "add", False)]
    return [TimedMatrix(name, each.num_outputs, each.num_inputs, finish, norm) for name, each, finish, norm in uses]


def make_weights(matrix: TimedMatrix, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    import torch

    number = 1 + LEAST_BYTES // (matrix.n * matrix.k * dtype.itemsize)
    return [torch.randn(matrix.n, matrix.k, device=device, dtype=dtype) / matrix.k**0.5 for _ in range(number)]


def list_ways(
    matrix: TimedMatrix, x: Tensor, weights: Sequence[Tensor]
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], object]]]:
    """Yields names and functions of x and a weight: torch, the fastest of cuBLASLt, and each of our tiles."""
    from toka_async.kernels.cublaslt import CublasLt
    from toka_async.kernels.fused import FusedOps
    from toka_async.kernels.matmul import TunedProducts
    from toka_async.tuning.algorithms import AlgorithmChoice
    from toka_async.tuning.few_rows import TILES
    from toka_async.tuning.gemm import make_few_rows

    norm = (x.new_ones(matrix.k), 1e-5) if matrix.normed else None
    output = x.new_zeros(len(x), matrix.n if matrix.finish in ("store", "add") else matrix.n // 2)
    products = TunedProducts(CublasLt(x.device))
    choice = AlgorithmChoice(products, weights[:8], matrix.finish == "add", [len(x)])
    choice.use(choice.measure())
    for way, ops in (("torch", FusedOps()), ("cuBLASLt", FusedOps(products))):
        yield way, partial(_compute_usually, ops, matrix.finish, norm, output)
    few_rows = make_few_rows(x.device)
    for tile in TILES:
        if few_rows.can_run(matrix.finish, tile, x, weights[0]):
            yield str(tile), partial(_compute_by_tile, few_rows, matrix.finish, tile, norm, output)


def _compute_usually(ops: FusedOps, finish: str, norm: Norm | None, output: Tensor, x: Tensor, weight: Tensor) -> None:
    from toka_async.tuning.dense import compute_usually

    compute_usually(ops, finish, norm, x, weight, output)


def _compute_by_tile(
    products: FewRowsProducts,
    finish: str,
    tile: FewRowsTile,
    norm: Norm | None,
    output: Tensor,
    x: Tensor,
    weight: Tensor,
) -> None:
    products.run(finish, tile, x, weight, output, norm=norm)


def time_in_graph(compute: Callable[[Tensor], object], weights: Sequence[Tensor]) -> float:
    """Returns the microseconds of a product among others like it."""
    import torch

    from toka_async.tuning.clock import time_calls

    compute(weights[0])
    torch.cuda.synchronize()
    number = -(-PRODUCTS // len(weights)) * len(weights)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        for index in range(number):
            compute(weights[index % len(weights)])
    graph.replay()
    return min(time_calls(graph.replay, REPLAYS) for _ in range(3)) * 1000 / (REPLAYS * number)
