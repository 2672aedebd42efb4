"""Describes a start in lines: devices, types, and how much fits. Knows ranks' reports, not processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from toka_async.config import ParallelConfig
from toka_async.procs.child import Resources


def start_lines(ranks: Sequence[Resources], parallel: ParallelConfig) -> Iterator[str]:
    """A line each for device, dtype, context, cache and sequences, and for the ranks if there are several."""
    if not ranks:
        return
    first, num_tokens = ranks[0], min(rank.num_tokens for rank in ranks)
    each = " for each replica" if parallel.dp > 1 else ""
    yield _line("device", ", ".join(_count_devices(Counter(rank.device for rank in ranks))))
    if first.dtype:
        yield _line("dtype", first.dtype)
    if len(ranks) > 1:
        layout = f"parallel.dp={parallel.dp}, parallel.pp={parallel.pp}, parallel.tp={parallel.tp}"
        yield _line("ranks", f"{len(ranks)}: {layout}")
    yield _line("context", f"{first.max_context:,} tokens")
    yield _line("cache", f"{num_tokens:,} tokens{each}")
    yield _line("sequences", f"{first.max_seqs:,} at once{each}, {first.max_tokens:,} tokens a step")


def _line(name: str, what: str) -> str:
    return f"{name:<9}  {what}"


def _count_devices(names: Counter[str]) -> Iterator[str]:
    for name, count in names.items():
        yield name if count == 1 else f"{count} x {name}"
