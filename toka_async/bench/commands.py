"""`toka-async bench …`: the benchmarks' options. A benchmark's module is imported when it runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

SAMPLINGS = ("plain", "min_tokens", "logit_bias", "penalties", "logprobs", "allowed")

Add = Callable[[str, str], argparse.ArgumentParser]  # (benchmark's name, meaning) -> its parser


def add_benchmarks(add: Add) -> None:
    _add_control_plane(add("control-plane", "measure the processes around the model, with a simulated one"))
    _add_serve_load(add("serve-load", "measure a running server, of this or another engine, under a load"))
    _add_step(add("step", "time a rank's steps, without a server"))
    _add_products(add("products", "time the ways to compute a model's products of few rows, on a GPU"))
    _add_attention(add("attention", "time attention of one layer on a GPU, by its parts"))
    _add_policy(add("policy", "compare ways to share the KV cache on given lengths, in simulated time"))
    _add_gaps(add("gaps", "gaps between tokens by the limit of a step's time, in simulated time"))


def run_benchmark(options: argparse.Namespace) -> int:
    """Runs the requested benchmark; returns the exit code."""
    match options.benchmark:
        case "control-plane":
            from toka_async.bench import control_plane

            return control_plane.main(options)
        case "serve-load":
            from toka_async.bench import serve_load

            return serve_load.main(options)
        case "step":
            from toka_async.bench import step

            return step.main(options)
        case "products":
            from toka_async.bench import products

            return products.main(options)
        case "attention":
            from toka_async.bench import attention

            return attention.main(options)
        case "policy":
            from toka_async.bench.policy import policy

            return policy.main(options)
        case "gaps":
            from toka_async.bench import gaps

            return gaps.main(options)
        case _:
            raise AssertionError(f"no benchmark {options.benchmark}")


def _add_control_plane(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=_count, default=8192, metavar="N", help="that run at once; default: 8192")
    parser.add_argument("--samples", type=_count, default=1024, metavar="N", help="of each request; default: 1024")
    parser.add_argument("--prompt-tokens", type=_count, default=700, metavar="N", help="default: 700")
    parser.add_argument("--output-tokens", type=_count, default=192, metavar="N", help="at most; default: 192")
    parser.add_argument("--stream", action="store_true", help="ask for server-sent events")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a stop string; may be repeated")
    parser.add_argument(
        "--logprobs", type=_logprobs, metavar="N", help="0: the chosen token's, N: of the likeliest too"
    )
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


def _add_serve_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:10210", help="default: http://127.0.0.1:10210")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument(
        "--load",
        choices=["samples", "trace", "ends", "rollouts", "single"],
        default="samples",
        help="many samples of one length (default); requests of a trace's lengths; samples that end by themselves; "
        "groups of samples of which some are very long; one user who streams",
    )
    parser.add_argument(
        "--questions", type=Path, metavar="FILE.jsonl", help="with question and answer; default: made up"
    )
    parser.add_argument("--shots-file", type=Path, metavar="FILE.jsonl", help="worked examples; default: --questions")
    parser.add_argument("--shots", type=_count, default=4, metavar="N", help="worked examples of a prompt; default: 4")
    parser.add_argument("--prompts", type=_count, default=16, metavar="N", help="of the samples loads; default: 16")
    parser.add_argument(
        "--samples",
        type=_count,
        metavar="N",
        help="of each prompt; default: of rollouts 16, else 16 to 1024, what takes half a minute or a little more by a "
        "small load before",
    )
    parser.add_argument(
        "--output-tokens",
        type=_count,
        metavar="N",
        help="default: 192; at most, where they end by themselves: 1024, of rollouts: 16 x --mean-tokens",
    )
    parser.add_argument(
        "--mean-tokens", type=_count, default=200, metavar="N", help="of --load ends and rollouts; default: 200"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE.csv", help="ContextTokens,GeneratedTokens; default: drawn")
    parser.add_argument("--requests", type=_count, metavar="N", help="of the trace: 4096; of the single user: 8")
    parser.add_argument("--vocab", type=_count, metavar="N", help="token ids there are; default: as the server says")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="T", help="default: 0.6")
    parser.add_argument("--top-p", type=_rate, metavar="P", help="default: 1, of a trace the model's own")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a stop string; may be repeated")
    parser.add_argument(
        "--logprobs", type=_logprobs, nargs="?", const=0, metavar="N", help="the chosen token's, or N likeliest too"
    )
    parser.add_argument("--stream", action="store_true", help="ask for server-sent events")
    parser.add_argument("--concurrency", type=_count, metavar="N", help="requests at once; default: all")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn; default: 0")
    parser.add_argument("--warm", action="store_true", help="a small load first, not measured")
    parser.add_argument("--repeat", type=_count, default=1, metavar="N", help="runs, the median counts; default: 1")
    parser.add_argument("--json", action="store_true", help="one line of JSON with every figure, not a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="tokens/s over time (needs toka-async[plot])")


def _add_policy(parser: argparse.ArgumentParser) -> None:
    columns = "prompt_tokens,output_tokens,max_tokens,group"
    parser.add_argument("--trace", type=Path, metavar="FILE.csv", help=f"lengths: {columns}; default: drawn")
    parser.add_argument(
        "--kind", choices=["gsm8k", "chat", "rollouts"], default="gsm8k", help="what is drawn; default: gsm8k"
    )
    parser.add_argument("--requests", type=_count, metavar="N", help="drawn; default: 32, chat: 16384, rollouts: 256")
    parser.add_argument(
        "--samples", type=_count, metavar="N", help="of each drawn; default: 512, chat: 1, rollouts: 16"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn; default: 0")
    parser.add_argument("--cache-tokens", type=_count, default=400_000, metavar="N", help="default: 400000")
    parser.add_argument("--page-size", type=_count, default=16, metavar="N", help="tokens of a page; default: 16")
    parser.add_argument("--max-seqs", type=_count, default=8192, metavar="N", help="rows of a step; default: 8192")
    parser.add_argument("--steps-ahead", type=_count, default=2, metavar="N", help="queued steps; default: 2")
    parser.add_argument("--base-us", type=_duration, default=2000.0, metavar="US", help="of a step; default: 2000")
    parser.add_argument("--row-us", type=_duration, default=4.5, metavar="US", help="of a row in it; default: 4.5")
    parser.add_argument("--prompt-token-us", type=_duration, default=5.0, metavar="US", help="likewise; default: 5")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="forecast and actual use (needs toka-async[plot])"
    )


def _add_gaps(parser: argparse.ArgumentParser) -> None:
    limits = "values of schedule.max_step_ms to compare, with commas; default: auto,0"
    parser.add_argument("--limits", type=lambda text: text.split(","), default=["auto", "0"], metavar="MS", help=limits)
    parser.add_argument("--users", type=_count, default=256, metavar="N", help="who stream; default: 256")
    parser.add_argument("--rounds", type=_count, default=4, metavar="N", help="requests of each user; default: 4")
    parser.add_argument("--prompt-tokens", type=_count, default=1024, metavar="N", help="of a user; default: 1024")
    parser.add_argument("--output-tokens", type=_count, default=256, metavar="N", help="of a user; default: 256")
    parser.add_argument("--trace", type=Path, metavar="FILE.csv", help="ContextTokens,GeneratedTokens; default: drawn")
    parser.add_argument("--requests", type=_count, default=4096, metavar="N", help="of the trace; default: 4096")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn; default: 0")
    parser.add_argument("--step-ms", type=_duration, default=1.2, metavar="MS", help="of a step; default: 1.2")
    parser.add_argument("--token-us", type=_duration, default=4.8, metavar="US", help="of a token in it; default: 4.8")
    parser.add_argument("--key-ns", type=_duration, default=7.6, metavar="NS", help="of a key in it; default: 7.6")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="further configuration")


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=_counts, default="1,64,512,4096,8192", metavar="N,…", help="decoding sequences")
    parser.add_argument("--context", type=_counts, default="128,1024", metavar="N,…", help="tokens of each sequence")
    parser.add_argument(
        "--shared-prefix", type=_whole_numbers, default="0", metavar="N,…", help="of these tokens, shared in a group"
    )
    parser.add_argument("--groups", type=_count, default=16, metavar="N", help="at most, of such rows; default: 16")
    parser.add_argument("--prompt", type=_counts, default=[], metavar="N,…", help="tokens of a prompt, in one step")
    parser.add_argument("--steps", type=_count, default=20, metavar="N", help="timed, the median counts; default: 20")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="T", help="default: 0.6")
    parser.add_argument("--top-p", type=_rate, default=1.0, metavar="P", help="default: 1")
    parser.add_argument("--logprobs", action="store_true", help="the chosen tokens' log-probs too")
    parser.add_argument(
        "--sampling",
        type=_samplings,
        default="plain",
        metavar="NAME,…",
        help=f"what rows ask for beside that: {', '.join(SAMPLINGS)}; default: plain",
    )
    parser.add_argument("--asking", type=_count, metavar="N", help="rows that ask; the others are plain; default: all")
    parser.add_argument("--json", action="store_true", help="one line of JSON a case")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="ms a step by rows (needs toka-async[plot])")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration of the rank")


def _add_products(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=_counts, default="1,2,4,8,16", metavar="N,…", help="default: 1,2,4,8,16")
    parser.add_argument("--json", action="store_true", help="one line of JSON a product")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration of the rank")


def _add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=_count, default=32, metavar="N", help="of queries; default: 32")
    parser.add_argument("--kv-heads", type=_count, default=8, metavar="N", help="of keys and values; default: 8")
    parser.add_argument("--dim", type=_counts, default="64,128", metavar="N,…", help="of a head; default: 64,128")
    parser.add_argument(
        "--rows", type=_counts, default="1,16,64,200,512,800", metavar="N,…", help="that decode; default: 1 to 800"
    )
    parser.add_argument("--context", type=_counts, default="1300", metavar="N,…", help="of a row, on average")
    parser.add_argument(
        "--longest", type=_count, default=100_000, metavar="N", help="of a row beside such rows; default: 100000"
    )
    parser.add_argument("--chunk", type=_counts, default="200", metavar="N,…", help="tokens of a prompt; default: 200")
    parser.add_argument(
        "--after", type=_counts, default="100000", metavar="N,…", help="tokens before the chunk; default: 100000"
    )
    parser.add_argument(
        "--cache-tokens", type=_count, default=2_000_000, metavar="N", help="of the cache; default: 2000000"
    )
    parser.add_argument("--cache-dtype", choices=("auto", "fp8"), default="auto", help="auto: bfloat16; default: auto")
    parser.add_argument("--json", action="store_true", help="one line of JSON a time")


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _samplings(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SAMPLINGS:
            raise argparse.ArgumentTypeError(f"expected {', '.join(SAMPLINGS)}, got {name}")
    return names


def _whole_numbers(text: str) -> list[int]:
    return [0 if part.strip() == "0" else _count(part) for part in text.split(",")]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def _logprobs(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 20:
        raise argparse.ArgumentTypeError(f"expected 0 to 20, got {text}")
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
