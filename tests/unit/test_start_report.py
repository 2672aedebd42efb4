from __future__ import annotations

from msgspec.structs import replace

from toka_async.config import ParallelConfig
from toka_async.procs.child import Resources
from toka_async.start_report import start_lines

RANK = Resources(
    device="NVIDIA H200 (140 GiB)",
    dtype="bfloat16",
    num_tokens=1_000_000,
    max_context=8192,
    max_seqs=4096,
    max_tokens=32768,
)


def test_one_rank() -> None:
    assert list(start_lines([RANK], ParallelConfig())) == [
        "device     NVIDIA H200 (140 GiB)",
        "dtype      bfloat16",
        "context    8,192 tokens",
        "cache      1,000,000 tokens",
        "sequences  4,096 at once, 32,768 tokens a step",
    ]


def test_several_ranks() -> None:
    ranks = [RANK, RANK, replace(RANK, num_tokens=900_000), replace(RANK, device="NVIDIA H100 (80 GiB)")]
    lines = list(start_lines(ranks, ParallelConfig(dp=2, tp=2)))
    assert lines[0] == "device     3 x NVIDIA H200 (140 GiB), NVIDIA H100 (80 GiB)"
    assert lines[2] == "ranks      4: parallel.dp=2, parallel.pp=1, parallel.tp=2"
    assert lines[4] == "cache      900,000 tokens for each replica"


def test_what_computes_nothing_has_no_dtype() -> None:
    lines = list(start_lines([replace(RANK, device="simulated", dtype="")], ParallelConfig()))
    assert lines[:2] == ["device     simulated", "context    8,192 tokens"]


def test_nobody_has_reported() -> None:
    assert list(start_lines([], ParallelConfig())) == []
