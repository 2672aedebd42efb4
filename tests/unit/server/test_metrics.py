from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from toka_async.messages import Stats
from toka_async.server.metrics import MOST_ADDED, SECONDS, ArrayHistogram, Metrics


def test_a_histogram_of_arrays_is_one() -> None:
    values = np.array([0.0, 0.25, 0.375, 0.001953125, 640.0, 1000.0])
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = ArrayHistogram("x_seconds", "meaning", SECONDS)
    ours.register(histogram)
    one_by_one = Histogram("toka:x_seconds", "meaning", buckets=SECONDS, registry=theirs)
    for part in (values[:2], values[2:], values[:0]):
        histogram.observe(part)
    for value in values:
        one_by_one.observe(value)
    lines = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == lines


def test_values_that_are_added_are_observed_when_somebody_looks() -> None:
    histogram = ArrayHistogram("x_seconds", "meaning", SECONDS)
    for round_ in range(2):
        for _ in range(MOST_ADDED + 5):
            histogram.add(0.5)
        (family,) = histogram.collect()
        counts = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
        num = (round_ + 1) * (MOST_ADDED + 5)
        assert (counts["0.25"], counts["+Inf"], counts["toka:x_seconds_sum"]) == (0, num, num / 2)


def test_times_of_the_scheduler() -> None:
    metrics, stats = Metrics(), Stats()
    metrics.watch(lambda: stats)
    assert b"toka:scheduler_microseconds{" not in metrics.text()
    stats = Stats(scheduler_us=(1.0, 2.0, 3.5), forecast_us=(0.5, 0.7, 0.9))
    lines = metrics.text().decode().splitlines()
    assert 'toka:scheduler_microseconds{quantile="0.99"} 2.0' in lines
    assert 'toka:scheduler_microseconds{quantile="1.0"} 3.5' in lines
    assert 'toka:forecast_microseconds{quantile="0.5"} 0.5' in lines
    assert any(line.startswith("process_cpu_seconds_total ") for line in lines)


def test_times_of_a_pipelines_stages() -> None:
    metrics, stats = Metrics(), Stats()
    metrics.watch(lambda: stats)
    assert b"toka:pipeline_seconds" not in metrics.text()
    stats = Stats(pipeline=((2.0, 0.5, 0.25), (3.0, 0.0, 1.0)))
    lines = metrics.text().decode().splitlines()
    assert 'toka:pipeline_seconds_total{stage="0",state="computing"} 1.5' in lines
    assert 'toka:pipeline_seconds_total{stage="0",state="stalled"} 0.5' in lines
    assert 'toka:pipeline_seconds_total{stage="1",state="computing"} 3.0' in lines
    assert 'toka:pipeline_seconds_total{stage="1",state="waiting"} 1.0' in lines


def test_memory_of_gpus() -> None:
    metrics, memory = Metrics(), dict[str, tuple[int, int, int]]()
    metrics.watch_memory(memory)
    assert b"toka:gpu_memory_bytes{" not in metrics.text()
    memory["rank-1-0"] = (10, 20, 80)
    lines = metrics.text().decode().splitlines()
    values = [f'toka:gpu_memory_bytes{{rank="1-0",state="{state}"}}' for state in ("allocated", "reserved", "total")]
    assert [line for line in lines if line.startswith("toka:gpu")] == [
        f"{name} {value}" for name, value in zip(values, ("10.0", "20.0", "80.0"), strict=True)
    ]
