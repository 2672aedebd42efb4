"""The process of `toka-async batch run`: in the server's place, without HTTP, one batch between files of the user's.

What is done is kept in a folder beside the output, so that a killed run goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import uvloop
import zmq

from toka_async.batches.clock import SettledClock
from toka_async.batches.disk import StorageError
from toka_async.batches.records import FINAL, Batch, BatchRecord, Fault, Progress
from toka_async.batches.store import Store
from toka_async.messages import ToServer
from toka_async.model.spec import ModelError
from toka_async.procs.child import Advanced, BatchJob, Drain, Drained, Finished, Order, ParentLink, Started
from toka_async.procs.server import connect, load_texts, take_orders
from toka_async.server.app import create_service
from toka_async.server.batch_service import BatchService
from toka_async.server.engine import Engine
from toka_async.text.chat import ChatTemplateError
from toka_async.text.tokenizer_files import TokenizerError
from toka_async.transport.codec import Codec
from toka_async.transport.zmq_sockets import ZmqInbox

INPUT, OUTPUT, ERRORS = "input", "output", "errors"  # ids of the files
REPORT_INTERVAL = 0.1  # seconds
STOP_TIMEOUT = 4.0  # seconds


def run(link: ParentLink) -> None:
    """Work until the batch has ended or the parent says otherwise."""
    uvloop.run(work(link))


async def work(link: ParentLink) -> NoReturn:
    spec, loop = link.spec, asyncio.get_running_loop()
    assert spec.job is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: ZmqInbox[ToServer] = ZmqInbox(context, spec.topology.server, Codec(ToServer))
    outboxes = [connect(context, address) for address in spec.topology.schedulers]
    engine = Engine(outboxes, spec.config.server.max_requests, page_size=spec.config.cache.page_size)
    try:
        store, begun, record = open_job(spec.job)
        service = create_service(spec.config.server, spec.served_name, *load_texts(spec), engine)
    except (ModelError, TokenizerError, ChatTemplateError, StorageError) as error:
        link.fatal(str(error), user=True)
    ended: asyncio.Future[Batch] = loop.create_future()
    batches = BatchService(store, service, on_progress=Reporter(link).on_progress, on_end=ended.set_result)
    orders = take_orders(link, context, outboxes, engine)
    is_ready = asyncio.Event()

    def on_messages(messages: Sequence[ToServer]) -> None:
        engine.on_messages(messages)
        if engine.ready is not None:
            is_ready.set()

    inbox.attach(loop, on_messages)
    await batches.start()
    if begun is None:
        await batches.batches.create(record)
    elif begun.record.status in FINAL:  # it was killed before it could say so
        ended.set_result(begun)
    await follow(link, ended, is_ready, order := asyncio.create_task(orders.get()))
    if not ended.done():
        engine.begin_drain()
        engine.fail_all("the run is stopped")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_TIMEOUT):
            await batches.stop()
    if isinstance(await order, Drain):
        link.report(Drained(0))
        link.exit()
    link.exit(1)


async def follow(
    link: ParentLink, ended: asyncio.Future[Batch], is_ready: asyncio.Event, order: asyncio.Task[Order]
) -> None:
    """Until the batch has ended and the parent knows, or until the parent has an order."""
    ready = asyncio.create_task(is_ready.wait())
    await first_of(ready, order, ended)
    check(link, ended)  # a file that is wrong is told before the engine is ready
    await first_of(ready, order)
    if ready.done():
        link.report(Started())
    await first_of(order, ended)
    check(link, ended)
    if ended.done():
        assert link.spec.job is not None
        Path(link.spec.job.output).touch()
        progress = ended.result().progress
        link.report(Finished(progress.completed, progress.failed))


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Waits until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def check(link: ParentLink, ended: asyncio.Future[Batch]) -> None:
    """Ends the process when one of the files cannot be worked on."""
    if ended.done() and ended.result().record.status == "failed":
        refuse(link, ended.result())


def refuse(link: ParentLink, batch: Batch) -> NoReturn:
    """One of the files cannot be worked on."""
    assert link.spec.job is not None
    if not batch.progress.completed + batch.progress.failed:
        shutil.rmtree(link.spec.job.folder, ignore_errors=True)
    link.fatal(complaint(link.spec.job, batch.record.faults), user=True)


def complaint(job: BatchJob, faults: Sequence[Fault]) -> str:
    """What is wrong with the files, in a line."""
    fault, *others = faults
    more = f" (and {len(others)} more faults)" if others else ""
    results = {"output_file_id": job.output, "error_file_id": job.errors}
    if (path := results.get(fault.param or "")) is not None:
        return f"{path}: {fault.message}, or remove {job.output}, {job.errors} and {job.folder} to begin anew{more}"
    where = f"{job.input}, line {fault.line}" if fault.line else job.input
    return f"{where}: {fault.message}{more}"


def open_job(job: BatchJob) -> tuple[Store, Batch | None, BatchRecord]:
    """The store, the batch in it if it was begun before, and its record, or that of the one that is to be begun.

    Raises:
        StorageError: the files are not what they were, or the folder cannot be used.
    """
    source = Path(job.input)
    places = {INPUT: source, OUTPUT: Path(job.output), ERRORS: Path(job.errors)}
    store = Store(Path(job.folder), SettledClock(), places=places)
    state = source.stat()
    about = {"input": job.input, "errors": job.errors, "size": str(state.st_size), "modified": str(state.st_mtime_ns)}
    begun = store.batches(None, 1)
    if not begun:
        return store, None, new_record(about)
    if begun[0].record.metadata != about:
        store.close()
        raise StorageError(f"{job.folder} is of another run, or the input has changed since; remove it to begin anew")
    try:
        check_results(job, begun[0].progress)
    except StorageError:
        store.close()
        raise
    return store, begun[0], begun[0].record


def check_results(job: BatchJob, progress: Progress) -> None:
    """Raises StorageError when a file that was begun has become shorter: it would be waited for without an end."""
    for path, wanted in ((Path(job.output), progress.output_bytes), (Path(job.errors), progress.error_bytes)):
        size = path.stat().st_size if path.is_file() else 0
        if size < wanted:
            raise StorageError(
                f"{path} has {size} bytes, but {wanted} were written: put it back, "
                f"or remove it and {job.folder} to begin anew"
            )


def new_record(about: dict[str, str]) -> BatchRecord:
    return BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint="",  # each line says its own
        input_file_id=INPUT,
        output_id=OUTPUT,
        error_id=ERRORS,
        created_at=int(time.time()),
        metadata=about,
    )


class Reporter:
    """Tells the parent how far the batch is, a few times a second."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link
        self._next = 0.0

    def on_progress(self, batch: Batch) -> None:
        progress, now = batch.progress, time.monotonic()
        done, total = progress.completed + progress.failed, batch.record.total
        if now >= self._next or done == total:
            self._next = now + REPORT_INTERVAL
            self._link.report(Advanced(done, progress.failed, total))
