"""What tensor ranks exchange, on GPUs: whether it is right, and what it costs. Starts its ranks itself, no server.

- Products fused with gathers and scatters against plain ones, and whole layers in shards of tokens against layers with
  all tokens on each rank.
- A layer's time, of the shapes of 8B and 70B Llamas (no attention in it): products alone, with all-reduces, in shards,
  in shards that overlap.
- Sampling: all logits gathered on every rank against each rank's share of the rows, both with the head's product; and
  the latter from a CUDA graph.

Times are rank 0's medians of runs in turns. The exit code is 1 where something is not right. What may hang comes last:
    python scripts/check_tensor_parallel.py --ranks 2 --json two.json
    python scripts/check_tensor_parallel.py --ranks 2 --tiny      # on CPUs, with gloo: a rehearsal of this script
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from toka_async.procs.rank import NO_MULTICAST

if TYPE_CHECKING:  # the environment is set before these load torch
    import torch
    from torch import Tensor

    from toka_async.model.activation_layout import SequenceSharded
    from toka_async.model.comm import Comm
    from toka_async.model.decoder import Decoder
    from toka_async.model.overlap import OverlappedShards

# As in a rank's process; NVLink's multicast stays off.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}
ROUNDS = 5
LIMIT = 150.0  # seconds, of all ranks
MOST_ERROR = 0.02  # of the largest value; bfloat16 has steps of 0.004


class Shape(NamedTuple):
    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int


class Load(NamedTuple):
    """counts: tokens of a step. sampled, vocab: of the sampling part, over `shapes[0]`'s hidden states."""

    shapes: tuple[Shape, ...]
    counts: tuple[int, ...]
    odd: int  # tokens that no number of ranks divides
    sampled: int
    vocab: int


LLAMAS = Load(
    (Shape("8B", 4096, 14336, 32, 8), Shape("70B", 8192, 28672, 64, 8)),
    (1024, 2048, 4096, 8192, 16384),
    odd=4093,
    sampled=4096,
    vocab=128256,
)
TINY = Load((Shape("tiny", 64, 96, 4, 2), Shape("small", 96, 192, 8, 4)), (16, 32), odd=13, sampled=3, vocab=203)


@dataclass(slots=True)
class Report:
    """What rank 0 found; everything of it is printed as it is found."""

    ranks: int
    device: str
    overlap: str = ""  # why nothing overlaps
    errors: dict[str, float] = field(default_factory=dict)
    layers: list[dict[str, float | str]] = field(default_factory=list)
    sampling: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Bench:
    """A rank, and what it says if it is the first."""

    comm: Comm
    device: torch.device
    load: Load
    report: Report
    json_file: Path | None

    def say(self, line: str) -> None:
        if self.comm.rank == 0:
            print(line, flush=True)
            if self.json_file is not None:
                self.json_file.write_text(json.dumps(asdict(self.report), indent=1))

    def check(self, what: str, error: float, most: float) -> None:
        self.report.errors[what] = error
        wrong = not error <= most  # NaN is
        if wrong:
            self.report.wrong.append(what)
        self.say(f"{'WRONG' if wrong else 'right'}  {what}: {error:.2e}")

    def medians(self, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Milliseconds of each, in turns."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(ROUNDS):
            for name, run in runs.items():
                times[name].append(self.timed(run))
        return {name: median(each) for name, each in times.items()}

    def timed(self, run: Callable[[], object]) -> float:
        import torch

        self.comm.minimum(0)  # ranks begin together
        if self.device.type == "cpu":
            begin = time.perf_counter()
            run()
            return 1000 * (time.perf_counter() - begin)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, one process each")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on CPUs")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    options = parser.parse_args(arguments)
    os.environ.update({**NO_MULTICAST, **ALLOCATOR})
    if options.tiny:
        os.environ.update({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    context = multiprocessing.get_context("spawn")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments_of = [(rank, options.ranks, options.tiny, folder, options.json) for rank in range(options.ranks)]
        processes = [context.Process(target=run_rank, args=each) for each in arguments_of]
        try:
            for process in processes:
                process.start()
            codes = wait_for(processes)
        finally:
            for process in processes:
                process.kill()
    print(f"{time.monotonic() - begin:.0f} s; ranks ended with {codes}")
    return 0 if all(code == 0 for code in codes) else 1


def wait_for(processes: Sequence[Any]) -> list[int | None]:
    """The exit codes; when one rank fails the others, which would wait for it, are not waited for."""
    until, running = time.monotonic() + LIMIT, {process.sentinel: process for process in processes}
    failed = False
    while running and not failed and (left := until - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait([*running], left):
            process = running.pop(sentinel)
            process.join(10)  # its sentinel is a little ahead of its end
            failed = failed or process.exitcode != 0
    return [process.exitcode for process in processes]


def run_rank(rank: int, size: int, tiny: bool, folder: str, json_file: Path | None) -> None:
    import torch

    from toka_async.model.comm import join

    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if not tiny:
        torch.cuda.set_device(device)
    comm = join(f"file://{folder}/group", rank, size, device)
    name = "cpu" if tiny else torch.cuda.get_device_name(device)
    report = Report(size, f"{size} x {name}, torch {torch.__version__}")
    bench = Bench(comm, device, TINY if tiny else LLAMAS, report, json_file)
    bench.say(report.device)
    with torch.inference_mode():
        check_and_time_sampling(bench, tiny)
        overlapping = find_overlap(bench, tiny)
        for shape in bench.load.shapes:
            check_and_time_layers(bench, one_layer(bench, shape), shape, overlapping)
    wrong = comm.minimum(-len(report.wrong))
    torch.distributed.destroy_process_group()
    sys.exit(1 if wrong else 0)


def find_overlap(bench: Bench, tiny: bool) -> OverlappedShards | None:
    """The shards that overlap; None where they cannot."""
    import torch

    from toka_async.model.overlap import build_overlapped, explain_obstacle, reserve

    comm, load = bench.comm, bench.load
    if tiny:  # what torch defines its fused products to be, in their place
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):
            torch.library.impl(f"symm_mem::fused_{name}", "CPU", getattr(memory, f"_fused_{name}_fallback"))
        return build_overlapped(comm)
    most = max(*load.counts, load.odd + comm.size) * max(shape.hidden for shape in load.shapes)
    bench.report.overlap = explain_obstacle(comm, bench.device) or reserve(comm, 2 * 2 * most // comm.size)
    bench.say(f"overlap: {bench.report.overlap or 'possible'}")
    return None if bench.report.overlap else build_overlapped(comm)


def one_layer(bench: Bench, shape: Shape) -> Decoder:
    """The rank's part of a decoder of one layer; `bfloat16` on a GPU, with the kernels that serve there."""
    import torch

    from toka_async.checkpoint.spec import read_spec
    from toka_async.model.weights import build_decoder, random_weights

    fields = {"model_type": "llama", "vocab_size": 1024, "num_hidden_layers": 1, "max_position_embeddings": 131072}
    fields |= {"hidden_size": shape.hidden, "intermediate_size": shape.inner, "rms_norm_eps": 1e-5}
    fields |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        spec = read_spec(Path(folder))
    ops, dtype = None, torch.float32
    if bench.device.type == "cuda":
        from toka_async.kernels.fused import FusedOps

        ops, dtype = FusedOps(), torch.bfloat16
    decoder = build_decoder(spec, dtype, bench.device, bench.comm, ops)
    random_weights(decoder, seed=bench.comm.rank)
    return decoder


def check_and_time_layers(bench: Bench, decoder: Decoder, shape: Shape, overlapping: OverlappedShards | None) -> None:
    from toka_async.model.activation_layout import Replicated, SequenceSharded
    from toka_async.model.comm import LocalComm
    from toka_async.tuning.async_tp import LAYERS, LayerRun

    comm, unsummed = bench.comm, LocalComm()
    unsummed.size = comm.size  # so that products are not added in place, as those of several ranks are not
    ways: dict[str, SequenceSharded] = {"shards": SequenceSharded(comm)}
    if overlapping is not None:
        ways["overlap"] = overlapping
    for name, way in ways.items():
        check_products(bench, decoder, f"{shape.name}, {name}", way)
        for num_tokens in (bench.load.counts[0], bench.load.odd):
            check_layer(bench, decoder, f"{shape.name}, {name}", way, num_tokens)
    bench.say(
        f"{'ms of a layer':>16}{'tokens':>8}{'products':>10}{'reduce':>10}{'shards':>10}{'overlap':>10}{'gain':>8}"
    )
    for count in bench.load.counts:
        own = -(-count // comm.size)
        runs: dict[str, Callable[[], object]] = {
            "products": LayerRun(decoder, Replicated(unsummed), count, count),
            "reduce": LayerRun(decoder, Replicated(comm), count, count),
            **{name: LayerRun(decoder, way, count, own) for name, way in ways.items()},
        }
        times = {name: ms / LAYERS for name, ms in bench.medians(runs).items()}
        bench.report.layers.append({"shape": shape.name, "tokens": count, **times})
        cells = "".join(f"{times[name]:>10.3f}" if name in times else f"{'-':>10}" for name in (*runs, "overlap")[:4])
        gain = times["reduce"] / times.get("overlap", times["shards"]) - 1
        bench.say(f"{shape.name:>16}{count:>8}{cells}{gain:>8.1%}")


def check_products(bench: Bench, decoder: Decoder, what: str, way: SequenceSharded) -> None:
    """The two products of a feed, against all tokens on every rank."""
    from toka_async.model.activation_layout import Replicated
    from toka_async.model.dense_feed import DenseFeed

    whole, feed = Replicated(bench.comm), decoder.list_layers()[0].feed
    assert isinstance(feed, DenseFeed)
    gate_up, down = feed.gate_up, feed.down
    x = same_on_all(decoder, bench.load.counts[-1], 1)
    inner = whole.column(gate_up.take(x), gate_up)
    got = way.column(gate_up.take(own(x, bench.comm)), gate_up)
    bench.check(f"{what}, gather and product", error(got, inner), MOST_ERROR)
    half = down.take(inner.chunk(2, dim=1)[0].contiguous())
    sums = [layout.row(half, down, x)[0] for layout in (whole, way)]
    assert sums[0] is not None
    assert sums[1] is not None
    bench.check(f"{what}, product and scatter", error(sums[1], own(sums[0], bench.comm)), MOST_ERROR)


def check_layer(bench: Bench, decoder: Decoder, what: str, way: SequenceSharded, num_tokens: int) -> None:
    """A layer's output and residual, for all tokens and with some wanted ones."""
    import torch

    from toka_async.model.activation_layout import Replicated
    from toka_async.tuning.async_tp import NoAttention

    layer, attention = decoder.list_layers()[0], NoAttention(decoder.num_heads)
    x, residual = same_on_all(decoder, num_tokens, 2), same_on_all(decoder, num_tokens, 3)
    rotations = decoder.rotate(torch.arange(num_tokens, device=x.device), x.dtype)
    expected = layer(x, residual, rotations, attention, Replicated(bench.comm))
    shares = [own(way.pad(each), bench.comm) for each in (x, residual)]
    what = f"{what}, layer of {num_tokens} tokens"
    for name, got, right in zip(
        ("output", "residual"), layer(*shares, rotations, attention, way), expected, strict=True
    ):
        bench.check(f"{what}, {name}", error(way.trim(way.gather(got), num_tokens), right), MOST_ERROR)
    wanted = torch.tensor([num_tokens - 1, 0], device=x.device)
    got, _ = layer.finish(*layer.attend(shares[0], shares[1], rotations, attention, way), way, wanted)
    assert got is not None
    bench.check(f"{what}, wanted ones", error(got, expected[0][wanted]), MOST_ERROR)


def same_on_all(decoder: Decoder, num_tokens: int, seed: int) -> Tensor:
    import torch

    assert decoder.norm is not None
    weight = decoder.norm.weight
    generator = torch.Generator(weight.device).manual_seed(seed)
    return torch.randn(num_tokens, weight.numel(), dtype=weight.dtype, device=weight.device, generator=generator)


def own(x: Tensor, comm: Comm) -> Tensor:
    return x.chunk(comm.size)[comm.rank]


def error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def check_and_time_sampling(bench: Bench, tiny: bool) -> None:
    import torch

    from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
    from toka_async.messages import Ready
    from toka_async.model.layers import VocabularyMatrix
    from toka_async.model.matrices.ops import TorchOps
    from toka_async.runner.kernel_sampler import KernelSampler
    from toka_async.runner.rows import RowTables
    from toka_async.runner.samples import RowShares
    from toka_async.runner.token_history import TokenHistory
    from toka_async.startup.synthetic import SyntheticRows
    from toka_async.startup.warmup import PLAIN

    comm, device, load = bench.comm, bench.device, bench.load
    num, hidden_size = load.sampled, load.shapes[0].hidden
    spec = MatrixSpec(names=("lm_head",), outputs=(Units(load.vocab),), inputs=Units(hidden_size), split="outputs")
    head = VocabularyMatrix(spec, comm, TorchOps()).to(device, torch.float32 if tiny else torch.bfloat16)
    head.weight.normal_(0.0, 0.05, generator=torch.Generator(device).manual_seed(comm.rank))
    ready = Ready(num_pages=2 * num, page_size=16, max_seqs=num, max_context=32, vocab_size=load.vocab, max_tokens=num)
    rows, history = RowTables(ready, device), TokenHistory(2 * num + 1, 16, device)
    gathered = KernelSampler(head.logits, rows, history)
    shared = KernelSampler(head.logits, rows, history, RowShares(comm, head.own_logits, num))
    admitted = rows.apply(SyntheticRows(ready).make_step([1] * num, PLAIN))
    for sampler in (gathered, shared):
        sampler.admit(admitted)
    x = torch.randn(
        num, hidden_size, dtype=head.weight.dtype, device=device, generator=torch.Generator(device).manual_seed(7)
    )
    for length in (1, 2, 3):  # a row is another rank's each time
        order = torch.randperm(num, generator=torch.Generator().manual_seed(length)).to(device)
        contexts = torch.full((num,), length, dtype=torch.int32, device=device)
        compare(bench, f"sampling, draw {length}", gathered.draw(x, order, contexts), shared.draw(x, order, contexts))
    if not tiny:
        check_graph(bench, gathered, shared, x, order)
    runs: dict[str, Callable[[], object]] = {
        "head": partial(torch.nn.functional.linear, x, head.weight),
        "all_gather": partial(gathered.draw, x, order, contexts),
        "all_to_all": partial(shared.draw, x, order, contexts),
    }
    times = bench.report.sampling = bench.medians(runs)
    cells = ", ".join(f"{name} {ms:.3f}" for name, ms in times.items())
    bench.say(f"sampling {num} rows of {load.vocab} ids, the head's product alone and with the rest, ms: {cells}")


def compare(bench: Bench, what: str, expected: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> None:
    """Share of rows with another token: the head's numbers are the same bits both ways, so there is none."""
    bench.check(f"{what}: other tokens", float((expected[0] != got[0]).float().mean()), 0.0)
    bench.check(f"{what}: log-probs", float((expected[1] - got[1]).abs().max()), 1e-4)


def check_graph(bench: Bench, gathered: Any, shared: Any, x: Tensor, order: Tensor) -> None:
    """Both samplers draw twice, one of them from a captured graph."""
    import torch

    contexts = torch.full((len(x),), 9, dtype=torch.int32, device=x.device)
    gathered.draw(x, order, contexts)  # as the warm-up of the other
    expected = gathered.draw(x, order, contexts)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        shared.draw(x, order, contexts)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        got = shared.draw(x, order, contexts)
    graph.replay()
    torch.cuda.synchronize()
    compare(bench, "sampling from a graph", expected, got)


if __name__ == "__main__":
    sys.exit(main())
