from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.drivers.web_server import NAME, WebServer, web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async import __version__
from toka_async.arrays import EMPTY, column
from toka_async.messages import Reason, Stats
from toka_async.server.engine.metrics import MOST_WAITING, SECONDS, ArrayHistogram, Metrics
from toka_async.server.engine.vllm_metrics import NAMES


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


def test_values_that_wait_are_counted_when_somebody_looks() -> None:
    histogram = ArrayHistogram("x_seconds", "meaning", SECONDS)
    for round_ in range(2):
        for _ in range(MOST_WAITING + 5):
            histogram.observe(np.array([0.5]))
        (family,) = histogram.collect()
        counts = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
        num = (round_ + 1) * (MOST_WAITING + 5)
        assert (counts["0.25"], counts["+Inf"], counts["toka:x_seconds_sum"]) == (0, num, num / 2)


def test_ends_of_many_samples() -> None:
    metrics = Metrics()
    metrics.samples_ended(np.zeros(0, np.int64))
    metrics.samples_ended(np.array([0, 0], np.int64))
    metrics.samples_ended(np.array([0, Reason.LENGTH, Reason.STOP_STRING, Reason.STOP, 0], np.int64))
    lines = metrics.text().decode().splitlines()
    assert 'toka:request_success_total{finished_reason="length"} 1.0' in lines
    assert 'toka:request_success_total{finished_reason="stop"} 2.0' in lines


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


def test_loads_of_experts() -> None:
    metrics, stats = Metrics(), Stats()
    metrics.watch(lambda: stats)
    assert b"toka:expert_" not in metrics.text()
    loads = (column(np.array(counts)) for counts in ([1, 2, 6], [4, 0, 0], [0, 0, 0]))
    stats = Stats(expert_loads=(EMPTY, *loads))
    lines = metrics.text().decode().splitlines()
    assert [line for line in lines if line.startswith("toka:expert_")] == [
        'toka:expert_tokens_total{expert="0"} 5.0',
        'toka:expert_tokens_total{expert="1"} 2.0',
        'toka:expert_tokens_total{expert="2"} 6.0',
        'toka:expert_peak_load{layer="1"} 2.0',
        'toka:expert_peak_load{layer="2"} 3.0',
    ]


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


def families_of(text: bytes) -> dict[str, Metric]:
    """By name; a name that is there twice, or a line that cannot be read, fails."""
    families: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.name not in families
        families[family.name] = family
    return families


async def text_of(server: WebServer) -> bytes:
    async with server.http.get(server.url + "/metrics") as response:
        return await response.read()


async def test_what_an_answer_brought_is_counted_when_it_has_come() -> None:
    async with web_server() as server:
        await server.ok("/v1/completions", {"prompt": "x", "n": 3, "max_tokens": 4})
        server.engine.on_messages([Stats()])  # as if the scheduler had not told of it
        assert b"toka:generation_tokens_total 12.0" in await text_of(server)


async def test_the_server_says_what_it_serves() -> None:
    async with web_server() as server:
        text = (await text_of(server)).decode()
    assert f'toka:server_info{{model_name="{NAME}",version="{__version__}"}} 1.0' in text
    assert "_created" not in text
    assert "vllm:" not in text


async def test_vllms_names_have_our_values() -> None:
    async with web_server(vllm_metrics=True) as server:
        await server.ok("/v1/completions", {"prompt": "x", "n": 2, "max_tokens": 4})
        families = families_of(await text_of(server))
    labels = {"model_name": NAME, "engine": "0"}
    for theirs, ours in NAMES.items():
        copy, original = families[f"vllm:{theirs}"], families[f"toka:{ours}"]
        assert copy.type == original.type
        assert [(each.name.removeprefix(copy.name), each.labels, each.value) for each in copy.samples] == [
            (each.name.removeprefix(original.name), labels | each.labels, each.value) for each in original.samples
        ]
    (cache,) = families["vllm:cache_config_info"].samples
    assert cache.labels == labels | {"block_size": "16", "num_gpu_blocks": "256"}
    (tokens,) = families["vllm:generation_tokens"].samples
    assert (tokens.name, tokens.value) == ("vllm:generation_tokens_total", 8.0)


async def test_vllms_names_before_the_engine_is_ready() -> None:
    async with web_server(FakeScheduler(ready=None), vllm_metrics=True) as server:
        families = families_of(await text_of(server))
    assert "vllm:num_requests_running" in families
    assert "vllm:cache_config_info" not in families
