"""Draws tokens per second over time as an image, with matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path

from toka_async.bench.loads.served import BenchError
from toka_async.bench.policy.policy_plot import check_available
from toka_async.bench.rates import Rates

__all__ = ["check_available", "plot"]


def plot(rates: Rates, path: Path) -> None:
    """Raises BenchError when the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    points = list(rates.per_second())
    axes.plot([time for time, _ in points], [rate for _, rate in points], color="tab:blue", linewidth=1.2)
    axes.set(xlabel="seconds", ylabel="output tokens/s")
    axes.set_ylim(bottom=0)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot {path}: {getattr(error, 'strerror', None) or error}") from None
