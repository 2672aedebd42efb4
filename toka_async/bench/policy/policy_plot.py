"""Draws forecast and actual page use with matplotlib, an optional extra. Knows the outcome of a replay."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from toka_async.bench.loads.served import BenchError
from toka_async.bench.policy.replay import Outcome


def check_available() -> None:
    if find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install matplotlib")


def plot(outcome: Outcome, num_pages: int, path: Path) -> None:
    """Draws the pages in use at each step, and the forecasts from where they were made.

    Raises BenchError when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    for i, (step, curve) in enumerate(outcome.forecasts):
        label = "forecast, if nothing more started" if i == 0 else None
        axes.plot(range(step, step + curve.size), curve, color="tab:orange", linewidth=0.6, label=label)
    axes.plot(outcome.pages, color="tab:blue", linewidth=1.2, label="in use")
    axes.axhline(num_pages, color="black", linewidth=0.8, linestyle="--", label="cache")
    axes.set(xlabel="step", ylabel="pages", xlim=(0, len(outcome.pages)), ylim=(0, num_pages * 1.1))
    axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot {path}: {getattr(error, 'strerror', None) or error}") from None
