"""Draws step times by rows as an image, with matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path

from toka_async.bench.loads.served import BenchError
from toka_async.bench.step_result import StepResult, StepTime


def plot(result: StepResult, path: Path) -> None:
    """Draws milliseconds by tokens in a step, a line for each context, prefix and sampling, and dashed floors.

    Raises BenchError when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    kinds: dict[tuple[int, int, str, bool], list[StepTime]] = {}
    for each in result.steps:
        kinds.setdefault((each.context, each.prefix, each.sampling, each.prompt > 0), []).append(each)
    for number, ((context, prefix, sampling, is_prompt), points) in enumerate(kinds.items()):
        sizes = [each.rows or each.prompt for each in points]
        label = "prompts" if is_prompt else f"context {context}" + (f", {prefix} shared" if prefix else "")
        label += f", {sampling}" if sampling != "plain" else ""
        color = f"C{number}"
        axes.plot(sizes, [each.ms for each in points], marker="o", color=color, label=label)
        axes.plot(sizes, [each.floor_ms for each in points], linestyle="--", color=color)
    axes.set(xlabel="tokens in the step", ylabel="ms (dashed: floor)", xscale="log", yscale="log")
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot {path}: {getattr(error, 'strerror', None) or error}") from None
