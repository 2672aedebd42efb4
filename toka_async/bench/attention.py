"""`toka-async bench attention`: times attention of one layer on a GPU, and its share of the floor.

The parts are those that a rank chooses from. A step's attention is planned once and computed for each layer; the parts
of captured steps are planned as for a graph. The floor is the time to read the keys and values once, or to multiply
with them, whichever is longer, at rates measured on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import msgspec
import torch

from toka_async.attention.base import AttentionBatch
from toka_async.attention.build import AttentionParts, build_attention
from toka_async.attention.choice import ChoiceTable, choose_always
from toka_async.attention.kv_cache import E4M3, CacheFormat, KVCache
from toka_async.attention.try_out import TrialShape, make_batch
from toka_async.bench.floor import COPY_BYTES, count_seconds
from toka_async.bench.loads.served import BenchError
from toka_async.tuning.attention import spread_contexts
from toka_async.tuning.clock import time_calls, time_host

NUM_LAYERS = 2  # in turn, so that keys come from memory
PAGE_SIZE = 16
MOST_ROWS = 8192
CALLS = 20
Run = Callable[[int, torch.Tensor, torch.Tensor], None]
LARGE = 8192  # rows and columns of the matrices that are multiplied to measure a rate


class AttentionTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a part takes. plan_us: microseconds of the host, once a step. ms: of a layer on the device.

    read_ms, multiply_ms: to read the keys and values once, and to multiply with them. share: of the longer, in ms.
    """

    shape: str
    dim: int
    part: str
    plan_us: float
    ms: float
    read_ms: float
    multiply_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """bandwidth: bytes per second. flops: per second."""

    bandwidth: float
    flops: float


def main(options: argparse.Namespace) -> int:
    """Prints each time as it is measured; returns the exit code."""
    try:
        check_gpu()
        if not options.json:
            names = ("plan_us", "ms", "read_ms", "multiply_ms", "share")
            print(f"{'shape':>28} {'dim':>4} {'part':>12}" + "".join(f"{name:>13}" for name in names))
        for each in measure(options):
            print(msgspec.json.encode(each).decode() if options.json else describe(each), flush=True)
    except BenchError as error:
        print(f"toka-async: {error}", file=sys.stderr)
        return 2
    return 0


def describe(each: AttentionTime) -> str:
    times = "".join(f"{ms:>13.4f}" for ms in (each.ms, each.read_ms, each.multiply_ms))
    return f"{each.shape:>28} {each.dim:>4} {each.part:>12}{each.plan_us:>13.1f}{times}{each.share:>13.1%}"


def check_gpu() -> None:
    """Raises BenchError if there is no GPU."""
    if not torch.cuda.is_available():
        raise BenchError("attention's parts need a GPU; torch finds none")


def measure(options: argparse.Namespace) -> Iterator[AttentionTime]:
    """Raises BenchError if our kernels do not work on the GPU."""
    device = torch.device("cuda")
    rates = _measure_rates(device)
    with torch.inference_mode():
        for dim in options.dim:
            parts = _make_parts(options, dim, device)
            for name, shape in list_shapes(options):
                yield from time_parts(parts, name, shape, rates)
            del parts
            torch.cuda.empty_cache()


def list_shapes(options: argparse.Namespace) -> Iterator[tuple[str, TrialShape]]:
    """Lists decoding rows, even and uneven, and one chunk of prompt after each number of tokens."""
    for rows in options.rows:
        for mean in options.context:
            yield f"{rows} rows of {mean}", TrialShape(((mean, 1),) * rows, rows)
            if rows > 1:
                uneven = [(context, 1) for context in spread_contexts(rows, mean, options.cache_tokens)]
                yield f"{rows} uneven rows of {mean}", TrialShape(uneven, rows)
                longest = [(options.longest, 1), *(((mean, 1),) * (rows - 1))]
                yield f"{rows} rows, one of {options.longest}", TrialShape(longest, rows)
    for before in options.after:
        for length in options.chunk:
            yield f"{length} tokens after {before}", TrialShape(((before + length, length),), 0)


def _make_parts(options: argparse.Namespace, dim: int, device: torch.device) -> AttentionParts:
    num_pages = -(-options.cache_tokens // PAGE_SIZE)
    stored = CacheFormat(E4M3 if options.cache_dtype == "fp8" else torch.bfloat16)
    shape = NUM_LAYERS, num_pages, options.kv_heads, PAGE_SIZE, dim
    cache = KVCache(*shape, torch.bfloat16, device, stored=stored)
    some = torch.randn(cache.keys[0][0].shape, device=device)  # a chip takes less power for zeros
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(some)
    found: list[AttentionParts] = []

    def choose(parts: AttentionParts) -> ChoiceTable:
        found.append(parts)
        return choose_always("triton")

    windows = (0,) * NUM_LAYERS
    build_attention("auto", cache, options.heads, windows, MOST_ROWS, max(LARGE, *options.chunk), choose=choose)
    if not found:
        raise BenchError("our kernels do not work on this GPU")
    return found[0]


def time_parts(parts: AttentionParts, name: str, shape: TrialShape, rates: DeviceRates) -> Iterator[AttentionTime]:
    """Yields the time of every part at the shape."""
    cache, batch = parts.cache, make_batch(parts.cache, shape)
    num_tokens = int(batch.query_lengths.sum())
    query = torch.randn((num_tokens, parts.num_heads, cache.head_dim), device=cache.device).to(cache.dtype)
    output = torch.empty_like(query)
    read, multiply = compute_floors(shape, parts.num_heads, cache, rates)
    for part, (plan, run) in list_plans(parts, batch).items():
        planned, seconds = _time_part(plan, [partial(run, layer, query, output) for layer in range(NUM_LAYERS)])
        yield AttentionTime(
            shape=name,
            dim=cache.head_dim,
            part=part,
            plan_us=round(planned * 1e6, 1),
            ms=round(seconds * 1e3, 4),
            read_ms=round(read * 1e3, 4),
            multiply_ms=round(multiply * 1e3, 4),
            share=round(max(read, multiply) / seconds, 4),
        )


def list_plans(parts: AttentionParts, batch: AttentionBatch) -> dict[str, tuple[Callable[[], None], Run]]:
    """Lists what plans the batch and what computes a layer, by part. Our decode part has a plan for graphs, too."""
    if not batch.num_decode:
        return {name: (partial(part.plan, batch, 0), part.run) for name, part in parts.chunks.items()}
    from toka_async.attention.triton import TritonDecode  # needs Triton, which is not everywhere

    plans: dict[str, tuple[Callable[[], None], Run]] = {}
    for name, part in parts.decode.items():
        plans[name] = (partial(part.plan, batch, (), 0), part.run)
        if isinstance(part, TritonDecode):
            plans["in graphs"] = (partial(part.plan_graph, batch, grouped=False, window=0), part.run)
    return plans


def compute_floors(shape: TrialShape, num_heads: int, cache: KVCache, rates: DeviceRates) -> tuple[float, float]:
    """Computes the least seconds of a layer to read keys and values, and to multiply queries with what they see."""
    num_keys = sum(context for context, _ in shape.rows)
    num_pairs = sum(length * context - length * (length - 1) // 2 for context, length in shape.rows)
    num_bytes = 2 * num_keys * cache.num_kv_heads * cache.head_dim * cache.keys[0].itemsize
    return num_bytes / rates.bandwidth, 4 * num_pairs * num_heads * cache.head_dim / rates.flops


def _time_part(plan: Callable[[], None], runs: Sequence[Callable[[], None]]) -> tuple[float, float]:
    """Returns the host's seconds of a plan, and the device's of a layer."""
    plan()
    for run in runs:
        run()
    planned = min(time_host(plan) for _ in range(3))
    layers = cycle(runs)

    def run_next() -> None:
        next(layers)()

    milliseconds = min(time_calls(run_next, CALLS, head_start=CALLS) for _ in range(3))
    return planned, milliseconds / CALLS / 1000


def _measure_rates(device: torch.device) -> DeviceRates:
    source = torch.zeros(COPY_BYTES["cuda"], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = torch.randn((LARGE, LARGE), device=device).to(torch.bfloat16)
    return DeviceRates(
        2 * source.numel() / count_seconds(lambda: target.copy_(source), device),
        2 * LARGE**3 / count_seconds(lambda: matrix @ matrix, device),
    )
