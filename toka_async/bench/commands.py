"""`toka-async bench …`: the benchmarks' options. A benchmark's module is imported when it runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

Add = Callable[[str, str], argparse.ArgumentParser]  # a benchmark's name and meaning -> its parser


def add_benchmarks(add: Add) -> None:
    """Defines every benchmark and its options."""
    _add_control_plane(add("control-plane", "measure the processes around the model, with a simulated one"))


def run_benchmark(options: argparse.Namespace) -> int:
    """Run the one that was asked for; the exit code."""
    match options.benchmark:
        case "control-plane":
            from toka_async.bench import control_plane

            return control_plane.main(options)
        case _:
            raise AssertionError(f"no benchmark {options.benchmark}")


def _add_control_plane(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=_count, default=8192, metavar="N", help="that run at once; default: 8192")
    parser.add_argument("--samples", type=_count, default=1024, metavar="N", help="of each request; default: 1024")
    parser.add_argument("--prompt-tokens", type=_count, default=700, metavar="N", help="default: 700")
    parser.add_argument("--output-tokens", type=_count, default=192, metavar="N", help="at most; default: 192")
    parser.add_argument("--stream", action="store_true", help="ask for server-sent events")
    parser.add_argument(
        "--step-ms", type=_duration, default=0.0, metavar="MS", help="of the simulated model; default: 0"
    )
    parser.add_argument(
        "--end-rate", type=_rate, default=0.002, metavar="R", help="chance that a token ends its sample; default: 0.002"
    )
    parser.add_argument(
        "--connections", type=_count, metavar="N", help="open requests; default: as many as sequences need"
    )
    parser.add_argument("--waves", type=_count, default=2, metavar="N", help="requests of each connection; default: 2")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="configuration of the server, beside what is measured"
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def _duration(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 60000:
        raise argparse.ArgumentTypeError(f"expected 0 to 60000, got {text}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if math.isnan(value) or not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected 0 to 1, got {text}")
    return value
