"""Metrics of accounts: what each key holds and was refused, for those who may see it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toka_async.server.access.guard import Guard


class GuardCollector(Collector):
    """Collects metrics per key, from its first request on. shown: the owners, besides the server itself; None: all."""

    def __init__(self, guard: Guard, shown: frozenset[str] | None) -> None:
        self._guard = guard
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        accounts = self._guard.accounts
        requests = GaugeMetricFamily("toka:held_requests", "prompts held, by owner", labels=["owner"])
        tokens = GaugeMetricFamily("toka:held_tokens", "their tokens, max_tokens included", labels=["owner"])
        waiting = GaugeMetricFamily("toka:waiting_requests", "prompts that wait for room, by owner", labels=["owner"])
        refused = CounterMetricFamily("toka:refused_requests", "prompts refused with 429", labels=["owner"])
        owners = (each for each in accounts.by_name.values() if self._shown is None or each.owner in self._shown)
        for account in (accounts.total, accounts.batches, *owners):
            requests.add_metric([account.owner], account.num_requests)
            tokens.add_metric([account.owner], account.num_tokens)
            waiting.add_metric([account.owner], account.num_waiting)
            refused.add_metric([account.owner], account.num_refused)
        unauthorized = CounterMetricFamily("toka:unauthorized_requests", "without a key, or with a wrong one")
        unauthorized.add_metric([], self._guard.num_unauthorized)
        foreign = CounterMetricFamily("toka:foreign_requests", "of web pages and for names that are not allowed")
        foreign.add_metric([], self._guard.num_foreign)
        yield from (requests, tokens, waiting, refused, unauthorized, foreign)


def format_account_metrics(guard: Guard, shown: frozenset[str] | None) -> bytes:
    """Formats the metrics for Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(GuardCollector(guard, shown))
    return generate_latest(registry)
