"""The forecast of what runs: page use at each step to come, given how long each running sequence goes on.

Knows the running set; not how the lengths were guessed, nor what may start.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32
from toka_async.scheduler.admission.forecast import UsageCurve, last_use, own_pages, shared_pages
from toka_async.scheduler.sequences.running import RunningSet

FAR = 1 << 20  # steps: a prompt whose samples have not all started is held for longer than any forecast looks


def sequence_lanes(running: RunningSet) -> Int32:
    """Lanes that decode, then those that still compute the prompt of their one sample."""
    computing = [run.lane for run in running.prefilling if run.job.sample >= 0]
    return np.concatenate([running.rows, np.asarray(computing, dtype=np.int32)])


def running_usage(running: RunningSet, lanes: Int32, remaining: Int32) -> UsageCurve:
    """Pages in use at each step from the one being built on.

    Args:
        running: as it is when the step's rows have the pages that they write to.
        lanes: `sequence_lanes`. remaining: int32 [s], at least 1: steps for which each of them goes on.
    """
    tables, size = running.lanes, running.cache.page_size
    position = tables.position[lanes]
    computing = [run.num_to_compute for run in running.prefilling if run.job.sample >= 0]
    position[running.rows.size :] = computing  # all pages of their prompts are taken; they decode soon
    held = -(-position // size) - tables.num_shared[lanes]
    horizon = int(remaining.max(initial=1))
    ends, counts = _shared(running, lanes, remaining)
    curve = own_pages(position, remaining, held, size, horizon) + shared_pages(ends, counts, horizon)
    return UsageCurve(curve.astype(np.float64), rest=float(counts[ends == FAR].sum()))


def _shared(running: RunningSet, lanes: Int32, remaining: Int32) -> tuple[Int32, Int32]:
    """Ends of prompts' pages, each page counted once, and the number of pages for each end."""
    if not running.runs:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    keys = np.fromiter(running.runs, dtype=np.int32, count=len(running.runs))
    by_key = np.zeros(int(keys.max()) + 1, np.int32)
    np.maximum.at(by_key, running.lanes.prompt_key[lanes], remaining)
    by_key[[run.key for run in (*running.forking, *running.prefilling)]] = FAR
    ends = by_key[keys]
    runs = list(running.runs.values())
    pages = [runs[i].pages for i in np.argsort(ends, kind="stable").tolist()]
    sizes = np.fromiter(map(len, pages), dtype=np.int32, count=len(pages))
    tails = np.asarray([run.tail_page for run in runs if run.tail_page >= 0], dtype=np.int32)
    until = np.concatenate([np.repeat(np.sort(ends), sizes), np.full(tails.size, FAR)])
    return last_use(np.concatenate([*pages, tails]), until.astype(np.int32), running.cache.num_pages)
