"""The prompts of one request go to the engine, and leave it, in slices: there may be tens of thousands of them.

Knows the engine's jobs; knows nothing of how they were made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice

from toka_async.server.engine.engine import Engine
from toka_async.server.engine.inflight import RequestGroup
from toka_async.server.engine.slices import SLICE, in_slices
from toka_async.server.limits.jobs import EngineRequest


@asynccontextmanager
async def submitted_too(engine: Engine, batch: RequestGroup, jobs: Iterator[EngineRequest]) -> AsyncIterator[None]:
    """While in it, those jobs run besides the first ones of the batch; left with an exception, all are cancelled.

    To be entered within `Engine.submitted` of the first ones. Room in the engine for all is the accounts' affair.

    Raises:
        NotServingError, RequestFailedError, EngineStoppedError: nothing of the batch is in the engine.
    """
    try:
        while part := list(islice(jobs, SLICE)):
            await asyncio.sleep(0)
            batch.check()
            engine.check_serving()
            for job in part:
                engine.submit(job, batch)
        yield
        while len(batch.flights) > SLICE:  # what they hold is freed in slices too
            del batch.flights[-SLICE:]
            await asyncio.sleep(0)
    except (Exception, asyncio.CancelledError):
        async for flight in in_slices(batch.flights):  # interrupted, `Engine.submitted` cancels the rest at once
            engine.cancel(flight)
        raise
