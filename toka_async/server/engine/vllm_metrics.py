"""vLLM's names for what this server counts too, for dashboards, autoscalers and gateways that know only those.

Each is a copy of one of our own metrics, so it means what ours means: a sample counts where vLLM counts a request.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toka_async.server.engine.engine import Engine

PREFIX, OURS = "vllm:", "toka:"
NAMES = {  # vLLM's -> ours; where vLLM has renamed one, both of its names
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "request_success": "request_success",
    "num_preemptions": "num_preemptions",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
}


class VllmCollector(Collector):
    """Copies, with the labels that vLLM's have: the model's name, and one engine for all replicas together."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        ours = {family.name: family for family in self._engine.metrics.registry.collect()}
        for theirs, name in NAMES.items():
            yield self._copy(ours[OURS + name], PREFIX + theirs)
        yield from self._cache_config()

    def _copy(self, family: Metric, name: str) -> Metric:
        copy = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            copy.add_sample(name + sample.name.removeprefix(family.name), self._labels | sample.labels, sample.value)
        return copy

    def _cache_config(self) -> Iterator[Metric]:
        """Once it is known."""
        ready = [replica.ready for replica in self._engine.replicas.replicas if replica.ready is not None]
        if ready:
            pages = str(sum(each.num_pages for each in ready))
            labels = {"block_size": str(ready[0].page_size), "num_gpu_blocks": pages} | self._labels
            family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "pages of the KV cache", labels=list(labels))
            family.add_metric(list(labels.values()), 1.0)
            yield family
