"""The process of `toka-async batch run`: works on one batch between the user's files, without HTTP, in the server's
place.

Results are kept in a folder beside the output, so that a killed run continues where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from toka_async.batches.disk import StorageError
from toka_async.batches.folder import StoreFolder
from toka_async.batches.records import Batch
from toka_async.checkpoint.spec import ModelError
from toka_async.procs.child import Advanced, Drain, Drained, Finished, Order, ParentLink, Started
from toka_async.procs.engine_link import EngineLink
from toka_async.procs.job import describe_fault, open_job
from toka_async.procs.server import load_texts
from toka_async.server.app import create_service
from toka_async.server.batch.batch_service import BatchService
from toka_async.text.chat import ChatTemplateError
from toka_async.text.tokenizer_files import TokenizerError

REPORT_INTERVAL = 0.1  # seconds
STOP_TIMEOUT = 4.0  # seconds


def run(link: ParentLink) -> None:
    """Work until the batch ends or the parent gives an order."""
    uvloop.run(work(link))


async def work(link: ParentLink) -> NoReturn:
    spec, loop = link.spec, asyncio.get_running_loop()
    assert spec.job is not None
    schedulers = EngineLink(link)
    engine = schedulers.engine
    try:
        job = open_job(spec.job)
        service = create_service(spec.config, spec.served_name, *load_texts(spec), engine)
    except (ModelError, TokenizerError, ChatTemplateError, StorageError) as error:
        link.fatal(str(error), user=True)
    ended: asyncio.Future[Batch] = loop.create_future()
    reporter = Reporter(link)
    batches = BatchService(
        job.store,
        service,
        spec.config.batches,
        on_progress=reporter.on_progress,
        on_end=ended.set_result,
        one_model=True,
    )
    schedulers.start()
    await batches.start()
    if job.begun is None:
        await batches.batches.create(job.record)
    elif job.is_finished:  # since the parent checked
        ended.set_result(job.begun)
    await follow(link, ended, schedulers.is_ready, order := asyncio.create_task(schedulers.orders.get()))
    if not ended.done():
        engine.begin_drain()
        engine.fail_all("the run is stopped")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_TIMEOUT):
            await batches.stop()
    reporter.report()
    if isinstance(await order, Drain):
        link.report(Drained(0))
        link.exit()
    link.exit(1)


async def follow(
    link: ParentLink, ended: asyncio.Future[Batch], is_ready: asyncio.Event, order: asyncio.Task[Order]
) -> None:
    """Wait until the batch has ended and the parent knows, or until the parent gives an order."""
    ready = asyncio.create_task(is_ready.wait())
    await wait_first(ready, order, ended)
    check(link, ended)  # an unusable file is reported before the engine is ready
    await wait_first(ready, order)
    if ready.done():
        link.report(Started())
    await wait_first(order, ended)
    check(link, ended)
    if ended.done():
        assert link.spec.job is not None
        Path(link.spec.job.output).touch()
        progress = ended.result().progress
        link.report(Finished(progress.completed, progress.failed, progress.input_tokens, progress.output_tokens))


async def wait_first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def check(link: ParentLink, ended: asyncio.Future[Batch]) -> None:
    """End the process if one of the files is unusable."""
    if ended.done() and ended.result().record.status == "failed":
        refuse(link, ended.result())


def refuse(link: ParentLink, batch: Batch) -> NoReturn:
    """End the process with the fault of the file, and discard a run that answered nothing."""
    job = link.spec.job
    assert job is not None
    if not batch.progress.completed + batch.progress.failed:
        StoreFolder(Path(job.folder)).discard()
    link.fatal(describe_fault(job, batch), user=True)


class Reporter:
    """Tells the parent how far the batch is, a few times a second."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link
        self._next = 0.0
        self._latest: Advanced | None = None

    def on_progress(self, batch: Batch) -> None:
        progress, now = batch.progress, time.monotonic()
        done, total = progress.completed + progress.failed, batch.record.total
        self._latest = Advanced(done, progress.failed, total, progress.output_tokens)
        if now >= self._next or done == total:
            self._next = now + REPORT_INTERVAL
            self.report()

    def report(self) -> None:
        if self._latest is not None:
            self._link.report(self._latest)
