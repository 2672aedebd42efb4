"""Draws step times by rows as an image, with matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path

from toka_async.bench.loads.served import BenchError
from toka_async.bench.step_result import StepResult


def plot(result: StepResult, path: Path) -> None:
    """Draws milliseconds by tokens in a step, a line for each context and prefix, and dashed floors.

    Raises BenchError when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    kinds = dict.fromkeys((each.context, each.prefix, each.prompt > 0) for each in result.steps)
    for number, kind in enumerate(kinds):
        context, prefix, is_prompt = kind
        points = [each for each in result.steps if (each.context, each.prefix, each.prompt > 0) == kind]
        sizes = [each.rows or each.prompt for each in points]
        label = "prompts" if is_prompt else f"context {context}" + (f", {prefix} shared" if prefix else "")
        color = f"C{number}"
        axes.plot(sizes, [each.ms for each in points], marker="o", color=color, label=label)
        axes.plot(sizes, [each.floor_ms for each in points], linestyle="--", color=color)
    axes.set(xlabel="tokens in the step", ylabel="ms (dashed: floor)", xscale="log", yscale="log")
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot {path}: {getattr(error, 'strerror', None) or error}") from None
