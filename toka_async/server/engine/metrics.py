"""Prometheus metrics, named as vLLM's dashboards have them, under `toka:`.

Counts of the scheduler are read from its newest Stats when somebody asks; latencies are observed as they happen.
Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from toka_async.arrays import Int64, as_i64
from toka_async.messages import GAP_SECONDS, SCHEDULER_STAGES, STEP_COSTS, Reason, Stats
from toka_async.server.engine.replicas import Replica, Replicas

Float64 = npt.NDArray[np.float64]

SECONDS = GAP_SECONDS
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920, 7680)
LABELS = {
    Reason.STOP: "stop",
    Reason.STOP_STRING: "stop",
    Reason.LENGTH: "length",
    Reason.ABORT: "abort",
    Reason.ERROR: "error",
}
NO_GUESS = (0.0, 0.0)


def usage(stats: Stats) -> float:
    """Share of pages that running sequences own; cached pages of nobody are free to take."""
    return stats.pages_used / stats.num_pages if stats.num_pages else 0.0


GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "num_requests_running": ("sequences that are computed", lambda s: s.num_running),
    "num_requests_waiting": ("sequences that wait", lambda s: s.num_waiting),
    "kv_cache_usage_perc": ("share of the KV cache's pages in use, 1 is all", usage),
    "kv_cache_pages_used": ("pages that running sequences own", lambda s: s.pages_used),
    "kv_cache_pages_cached": ("pages of earlier prompts that nobody owns, free to take", lambda s: s.pages_cached),
    "kv_cache_pages": ("pages in all", lambda s: s.num_pages),
    "window_pages_used": (
        "pages of layers with a sliding window that running sequences see",
        lambda s: s.window_pages_used,
    ),
    "window_pages_cached": ("of these layers, pages at pages of the prefix tree", lambda s: s.window_pages_cached),
    "window_pages": ("of these layers, pages in all", lambda s: s.num_window_pages),
    "state_snapshots_used": (
        "recurrent states that prompts hold for samples that have not started",
        lambda s: s.snapshots_used,
    ),
    "state_snapshots_cached": ("recurrent states at pages of the prefix tree", lambda s: s.snapshots_cached),
    "state_snapshots": ("recurrent states in all, beside those of rows", lambda s: s.num_snapshots),
    "expected_length_mean": (
        "of new sequences, as a share of max_tokens",
        lambda s: (s.expected_length or NO_GUESS)[0],
    ),
    "expected_length_spread": ("its standard deviation", lambda s: (s.expected_length or NO_GUESS)[1]),
}
COUNTERS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "prefix_cache_queries": (
        "prompt tokens of all samples: a prompt counts for each of its",
        lambda s: s.prefix_queries,
    ),
    "prefix_cache_hits": ("of these, found in the cache or shared with another sample", lambda s: s.prefix_hits),
    "prefix_shared_tokens": ("of the hits, those that samples of one request share", lambda s: s.prefix_shared),
    "requests_started": ("requests whose prompt was begun", lambda s: s.num_started),
    "queue_seconds": ("time that these waited for it, all together", lambda s: s.queue_seconds),
    "computed_prompt_tokens": ("prompt tokens computed, those not found in the cache", lambda s: s.prompt_tokens),
    "num_preemptions": ("sequences preempted", lambda s: s.num_preemptions),
    "generation_tokens": ("tokens generated", lambda s: s.generated_tokens),
    "wasted_tokens": ("tokens computed after an end that was found late", lambda s: s.wasted_tokens),
    "recomputed_tokens": ("tokens computed again after a preemption", lambda s: s.recomputed_tokens),
    "steps": ("forward passes", lambda s: s.num_steps),
    "step_seconds": ("time in forward passes", lambda s: s.step_seconds),
    "prompt_steps": ("of these passes, those that computed prompts", lambda s: s.num_prompt_steps),
    "prompt_step_seconds": ("time in passes that computed prompts", lambda s: s.prompt_step_seconds),
    "grammar_tokens": ("tokens that were drawn by a grammar", lambda s: s.masked_rows),
    "mask_seconds": ("the hosts' time in masks of grammars", lambda s: s.mask_seconds),
    "mask_stall_seconds": ("time in which devices waited for masks", lambda s: s.mask_stall_seconds),
    "rank_idle_seconds": ("time in which ranks waited for the scheduler", lambda s: s.idle_seconds),
    "device_idle_seconds": ("time between steps that were queued in time", lambda s: s.device_idle_seconds),
    "compiles": (
        "kernels and graphs compiled, or missing, while serving: 0, or a rank was not warm",
        lambda s: s.num_compiles,
    ),
}
QUANTILES: dict[str, tuple[str, Callable[[Stats], tuple[float, ...]]]] = {
    "scheduler_microseconds": ("CPU time of the scheduler for a step, of the newest steps", lambda s: s.scheduler_us),
    "forecast_microseconds": ("time of a forecast for admission, of the newest", lambda s: s.forecast_us),
}
REPLICA_GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "up": ("1 when it takes requests", lambda r: float(r.ready is not None and r.lost is None)),
    "requests_running": ("sequences that run", lambda r: r.stats.num_running),
    "requests_waiting": ("sequences that wait", lambda r: r.stats.num_waiting),
    "kv_cache_usage_perc": ("share of the KV cache's pages in use, 1 is all", lambda r: usage(r.stats)),
    "kv_cache_bytes": (
        "bytes of its GPUs' KV caches",
        lambda r: sum(rank.cache for rank in r.ready.ranks) if r.ready is not None else 0,
    ),
    "async_tp_min_tokens": (
        "tokens of the smallest step in shards of the tensor ranks, 0: none is",
        lambda r: r.ready.async_tp_min_tokens if r.ready is not None else 0,
    ),
}
REPLICA_COUNTERS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "restarts": ("how often its processes were lost", lambda r: r.life),
    "generation_tokens": ("tokens generated", lambda r: r.past.generated_tokens + r.stats.generated_tokens),
}


class Metrics:
    """All metrics of one server, in a registry of their own; `process_…` are of the server's process."""

    def __init__(self) -> None:
        # The times at which counters were made: a series for each counter, of no use.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.aliases = CollectorRegistry()  # other names for some of them
        ProcessCollector(registry=self.registry)
        self._prompt_tokens = Counter("toka:prompt_tokens", "prompt tokens, cached ones too", registry=self.registry)
        self._success = Counter(
            "toka:request_success", "samples ended, by finish reason", ["finished_reason"], registry=self.registry
        )
        self._ended = {reason: self._success.labels(label) for reason, label in LABELS.items()}
        self._cancelled = Counter("toka:request_cancelled", "requests cancelled by clients", registry=self.registry)
        self._failed = Counter("toka:request_failed", "requests failed by the engine", registry=self.registry)
        self._http = Counter(
            "toka:http_requests",
            "HTTP requests by route and status, 499: the client left",
            ["path", "status"],
            registry=self.registry,
        )
        self._first = self._histogram("time_to_first_token_seconds", "until the prompt was computed", SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "until all samples had ended", REQUEST_SECONDS)

    def http_ended(self, path: str, status: int) -> None:
        """A request over HTTP was answered, or its client has left. `path`: of the route, not what was asked for."""
        self._http.labels(path, str(status)).inc()

    def watch(self, stats: Callable[[], Stats]) -> None:
        """Reads the scheduler's counts from `stats` when asked for them."""
        self.registry.register(StatsCollector(stats))

    def watch_replicas(self, replicas: Replicas) -> None:
        """Reads what there is of each replica when asked for it."""
        self.registry.register(ReplicasCollector(replicas))

    def watch_gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """A number that is asked for when somebody looks."""
        Gauge(f"toka:{name}", meaning, registry=self.registry).set_function(value)

    def watch_memory(self, memory: Mapping[str, tuple[int, int, int]]) -> None:
        """Reads what there is of each rank's GPU."""
        self.registry.register(MemoryCollector(memory))

    def watch_count(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """As `watch_gauge`, of a number that only grows."""
        self.registry.register(CountCollector(f"toka:{name}", meaning, value))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(self.aliases)

    def show_server(self, **labels: str) -> None:
        """What server this is: labels to join with, on a series that is always 1."""
        Info("toka:server", "the served model's name and the program's version", registry=self.registry).info(labels)

    @property
    def first_tokens(self) -> tuple[int, float]:
        """Requests whose prompt was computed, and the seconds that this took, all together."""
        return self._first.total()

    def samples_ended(self, reasons: Int64) -> None:
        """Why samples have ended, [s]; most of them may go on."""
        if reasons.any():
            for reason, count in enumerate(np.bincount(reasons).tolist()):
                if reason and count:
                    self._ended[Reason(reason)].inc(count)

    def prefills(self, num_prompt: int, seconds: Float64) -> None:
        """Prompts were computed, `num_prompt` tokens of all together, so long after each request's submission [r]."""
        self._prompt_tokens.inc(num_prompt)
        self._first.observe(seconds)

    def requests_ended(self, seconds: Float64) -> None:
        """All samples of requests have ended, so long after each one's submission [r]."""
        self._whole.observe(seconds)

    def cancelled(self, count: int = 1) -> None:
        self._cancelled.inc(count)

    def failed(self, count: int = 1) -> None:
        self._failed.inc(count)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> ArrayHistogram:
        histogram = ArrayHistogram(name, meaning, buckets)
        self.registry.register(histogram)
        return histogram


MOST_WAITING = 1024


class ArrayHistogram(Collector):
    """A histogram that many values are added to in one go."""

    def __init__(self, name: str, meaning: str, buckets: tuple[float, ...]) -> None:
        self._name = f"toka:{name}"
        self._meaning = meaning
        self._buckets = np.array(buckets)
        self._counts = np.zeros(len(buckets) + 1, np.int64)
        self._sum = 0.0
        self._waiting: list[Float64] = []  # values that are not counted yet

    def observe(self, values: Float64) -> None:
        """Values, [r]. Looking for their places is a hundred times cheaper for many together."""
        self._waiting.append(values)
        if len(self._waiting) == MOST_WAITING:
            self._count_waiting()

    def _count_waiting(self) -> None:
        if self._waiting:
            values = np.concatenate(self._waiting)
            self._waiting.clear()
            places = np.searchsorted(self._buckets, values)
            self._counts += np.bincount(places, minlength=self._counts.size)
            self._sum += float(values.sum())

    def total(self) -> tuple[int, float]:
        """How many values there were, and their sum."""
        self._count_waiting()
        return int(self._counts.sum()), self._sum

    def collect(self) -> Iterator[Metric]:
        self._count_waiting()
        names = [*map(floatToGoString, self._buckets.tolist()), "+Inf"]
        counts = np.cumsum(self._counts).tolist()
        buckets = [(name, float(count)) for name, count in zip(names, counts, strict=True)]
        yield HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum)


class CountCollector(Collector):
    """A counter that is kept elsewhere."""

    def __init__(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        self._name = name
        self._meaning = meaning
        self._value = value

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._meaning, value=self._value())


class MemoryCollector(Collector):
    """Bytes of GPUs, as the ranks' allocators count them."""

    def __init__(self, memory: Mapping[str, tuple[int, int, int]]) -> None:
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("toka:gpu_memory_bytes", "of a rank's GPU", labels=["rank", "state"])
        for name, values in sorted(self._memory.items()):
            for state, value in zip(("allocated", "reserved", "total"), values, strict=True):
                family.add_metric([name.removeprefix("rank-"), state], value)
        yield family


class StatsCollector(Collector):
    """Turns the newest Stats into metrics."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, (meaning, value) in GAUGES.items():
            yield GaugeMetricFamily(f"toka:{name}", meaning, value=value(stats))
        for name, (meaning, value) in COUNTERS.items():
            yield CounterMetricFamily(f"toka:{name}", meaning, value=value(stats))
        yield self._depths(stats)
        yield self._gaps(stats)
        stages = CounterMetricFamily(
            "toka:scheduler_stage_seconds", "CPU time of the scheduler, by what it does", labels=["stage"]
        )
        for stage, seconds in zip(SCHEDULER_STAGES, stats.stage_seconds, strict=False):
            stages.add_metric([stage], seconds)
        yield stages
        if stats.pipeline:
            yield self._pipeline(stats)
        if stats.expert_loads:
            yield from self._experts(stats)
        for name, (meaning, values) in QUANTILES.items():
            family = GaugeMetricFamily(f"toka:{name}", meaning, labels=["quantile"])
            for quantile, microseconds in zip(("0.5", "0.99", "1.0"), values(stats), strict=False):
                family.add_metric([quantile], microseconds)
            yield family

    @staticmethod
    def _pipeline(stats: Stats) -> Metric:
        """The share of stalled in computing and stalled is the pipeline's bubble."""
        family = CounterMetricFamily(
            "toka:pipeline_seconds",
            "of the stages' devices: computing steps, waiting for other stages within them, waiting for a step",
            labels=["stage", "state"],
        )
        for stage, (seconds, stalled, waited) in enumerate(stats.pipeline):
            for state, value in (("computing", seconds - stalled), ("stalled", stalled), ("waiting", waited)):
                family.add_metric([str(stage), state], value)
        return family

    @staticmethod
    def _experts(stats: Stats) -> Iterator[Metric]:
        """Experts of a number are on the same rank in all layers; how evenly a layer's are chosen is its own matter."""
        layers = {layer: as_i64(loads) for layer, loads in enumerate(stats.expert_loads) if len(loads)}
        tokens = CounterMetricFamily(
            "toka:expert_tokens", "tokens that chose the experts of a number, over all layers", labels=["expert"]
        )
        for expert, count in enumerate(np.sum([*layers.values()], axis=0).tolist()):
            tokens.add_metric([str(expert)], count)
        yield tokens
        peaks = GaugeMetricFamily(
            "toka:expert_peak_load", "tokens of a layer's busiest expert, as a multiple of the mean", labels=["layer"]
        )
        for layer, loads in layers.items():
            if loads.any():
                peaks.add_metric([str(layer)], float(loads.max() / loads.mean()))
        yield peaks

    @staticmethod
    def _gaps(stats: Stats) -> Metric:
        """As the scheduler sees tokens come back, however they are sent to clients."""
        counts = np.cumsum(stats.token_gaps or np.zeros(len(GAP_SECONDS) + 1)).tolist()
        names = [*map(floatToGoString, GAP_SECONDS), "+Inf"]
        return HistogramMetricFamily(
            "toka:inter_token_latency_seconds",
            "between two tokens of a sample; each counts, but a sample's first",
            buckets=list(zip(names, map(float, counts), strict=True)),
            sum_value=stats.token_gap_seconds,
        )

    @staticmethod
    def _depths(stats: Stats) -> Metric:
        """Steps still queued behind one that comes back: 0 means that ranks may have waited."""
        buckets = [(str(depth), float(count)) for depth, count in enumerate(np.cumsum(stats.depths).tolist())]
        total = sum(depth * count for depth, count in enumerate(stats.depths))
        buckets.append(("+Inf", float(sum(stats.depths))))
        return HistogramMetricFamily(
            "toka:steps_queued", "steps queued behind one that comes back", buckets=buckets, sum_value=total
        )


class ReplicasCollector(Collector):
    """What can be told of each replica, with its number as the label."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        each = [(str(index), replica) for index, replica in enumerate(self._replicas.replicas)]
        for name, (meaning, value) in REPLICA_GAUGES.items():
            gauge = GaugeMetricFamily(f"toka:replica_{name}", meaning, labels=["replica"])
            for index, replica in each:
                gauge.add_metric([index], value(replica))
            yield gauge
        for name, (meaning, value) in REPLICA_COUNTERS.items():
            counter = CounterMetricFamily(f"toka:replica_{name}", meaning, labels=["replica"])
            for index, replica in each:
                counter.add_metric([index], value(replica))
            yield counter
        costs = GaugeMetricFamily(
            "toka:replica_step_cost_seconds",
            "what a pass is expected to take: for itself, and for each token, key and pair of them",
            labels=["replica", "part"],
        )
        for index, replica in each:
            for part, seconds in zip(STEP_COSTS, replica.stats.step_costs, strict=False):
                costs.add_metric([index, part], seconds)
        yield costs
        outstanding = GaugeMetricFamily(
            "toka:replica_outstanding_tokens", "tokens that it may still have to compute", labels=["replica"]
        )
        for (index, _), tokens in zip(each, self._replicas.router.outstanding, strict=True):
            outstanding.add_metric([index], tokens)
        yield outstanding
