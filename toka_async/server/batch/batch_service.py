"""Files and batches of one server: the store, the thread that writes it, and the work on batches beside the engine's.

Knows no HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toka_async.batches.quota import Quota
from toka_async.batches.records import Batch
from toka_async.batches.store import Store
from toka_async.batches.work import Batches, InputFileLimits
from toka_async.batches.writer import Transactions, Writer
from toka_async.config import BatchesConfig
from toka_async.server.batch.line_answers import LineAnswers
from toka_async.server.engine.engine import Engine
from toka_async.server.generate.service import Service
from toka_async.server.limits.account import Account
from toka_async.server.limits.window import EngineLoad, Window

NUM_THREADS = 4  # that read and write files


class BatchService:
    """The store and work behind the routes of files and batches. Made without an event loop, begun in one.

    Args:
        store: opened; closed by `stop`.
        owner_account: finds the account of a batch's owner; None: no key has that name (any more).
        on_progress, on_end: see Batches.
        one_model: a file whose lines ask for another model is refused; otherwise these lines' answer says so.
    """

    def __init__(
        self,
        store: Store,
        service: Service,
        config: BatchesConfig,
        owner_account: Callable[[str], Account | None] = lambda _owner: None,
        on_progress: Callable[[Batch], None] = lambda _batch: None,
        on_end: Callable[[Batch], None] = lambda _batch: None,
        *,
        one_model: bool = False,
    ) -> None:
        self.store = store
        self.service = service
        self.config = config
        self.executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="files")
        self.batches: Batches
        self.writer: Writer
        self.receiving: Counter[str] = Counter()  # bytes of uploads that are not files yet, by owner
        self._owner_account = owner_account
        self._on_progress = on_progress
        self._on_end = on_end
        self._model = service.name if one_model else ""

    @property
    def quota(self) -> Quota:
        """The limits of one owner."""
        config = self.config
        return Quota(config.key_max_open_batches, config.key_max_files, config.key_max_files_mb << 20)

    async def start(self) -> None:
        """Continues what has not ended, as soon as the engine takes requests."""
        self.writer = Writer(Transactions(self.store.database.connection, self.store.after_commit, self.store.forget))
        limits = InputFileLimits(self.config.max_batch_lines, self.service.config.max_body_mb << 20, self._model)
        self.batches = Batches(
            self.store,
            self.writer,
            LineAnswers(self.service, self.account_of),
            limits,
            self.executor,
            self._on_progress,
            self._on_end,
        )
        engine = self.service.engine
        engine.metrics.registry.register(BatchCollector(self.batches, self.service.accounts.window))
        engine.on_state.append(self.follow)
        self.follow()
        self.batches.start()

    def account_of(self, owner: str) -> Account:
        """Returns the account of the owner's batches. An owner without a key any more has the server's limits only."""
        accounts = self.service.accounts
        if not owner:
            return accounts.batches_of(accounts.total)
        gone = "keys that are gone"
        return accounts.batches_of(self._owner_account(owner) or accounts.open(gone, 0, 0, 0, cache_owner=gone))

    def follow(self) -> None:
        """Reports a change of the engine's state to what depends on it."""
        engine = self.service.engine
        if engine.is_closing:
            self.batches.suspend()
        self.service.accounts.window.report(read_load(engine))

    async def stop(self) -> None:
        """Keeps what has ended; the rest continues after the next start."""
        await self.batches.stop()
        self.executor.shutdown(wait=False, cancel_futures=True)


def read_load(engine: Engine) -> EngineLoad:
    """Reads how full the engine is; no rows where it takes no requests."""
    ready, stats = engine.ready, engine.stats
    if ready is None or engine.is_closing:
        return EngineLoad(0)
    return EngineLoad(ready.max_seqs * len(engine.replicas.live), stats.num_running, stats.num_waiting)


class BatchCollector(Collector):
    def __init__(self, batches: Batches, window: Window) -> None:
        self._batches = batches
        self._window = window

    def collect(self) -> Iterator[Metric]:
        batches = self._batches
        yield GaugeMetricFamily("toka:batches_open", "batches that have not ended", value=batches.num_open)
        yield GaugeMetricFamily("toka:batch_samples_in_flight", "of batches", value=self._window.in_flight)
        yield GaugeMetricFamily("toka:batch_samples_allowed", "that may be", value=self._window.size)
        trouble = batches.ledger.trouble is not None
        yield GaugeMetricFamily("toka:batches_paused", "1 while the disk takes no results", value=float(trouble))
        lines = CounterMetricFamily("toka:batch_lines", "lines of batches that have ended", labels=["result"])
        lines.add_metric(["completed"], batches.ledger.num_completed)
        lines.add_metric(["failed"], batches.ledger.num_failed)
        yield lines
