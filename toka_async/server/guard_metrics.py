"""Metrics of accounts: what each key holds and was refused."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toka_async.server.guard import Guard


class GuardCollector(Collector):
    """Keys appear with their first request."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def collect(self) -> Iterator[Metric]:
        accounts = self._guard.accounts
        requests = GaugeMetricFamily("toka:held_requests", "prompts held, by owner", labels=["owner"])
        tokens = GaugeMetricFamily("toka:held_tokens", "their tokens, max_tokens included", labels=["owner"])
        waiting = GaugeMetricFamily("toka:waiting_requests", "prompts that wait for room, by owner", labels=["owner"])
        refused = CounterMetricFamily("toka:refused_requests", "prompts refused with 429", labels=["owner"])
        for account in (accounts.total, accounts.batches, *accounts.by_name.values()):
            requests.add_metric([account.owner], account.num_requests)
            tokens.add_metric([account.owner], account.num_tokens)
            waiting.add_metric([account.owner], account.num_waiting)
            refused.add_metric([account.owner], account.num_refused)
        unauthorized = CounterMetricFamily("toka:unauthorized_requests", "without a key, or with a wrong one")
        unauthorized.add_metric([], self._guard.num_unauthorized)
        yield from (requests, tokens, waiting, refused, unauthorized)
