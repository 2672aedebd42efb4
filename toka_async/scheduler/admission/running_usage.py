"""Forecasts page use of running sequences at each step to come, given how long each of them goes on.

Knows the running set; not how the lengths were predicted, nor what may start.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32
from toka_async.scheduler.admission.forecast import (
    UsageCurve,
    count_last_uses,
    forecast_own_pages,
    forecast_shared_pages,
    forecast_window_pages,
)
from toka_async.scheduler.cache.window_pool import WindowPool
from toka_async.scheduler.sequences.running import RunningSet

FAR = 1 << 20  # steps, beyond any forecast: the end of a prompt whose samples have not all started


def find_running_seqs(running: RunningSet) -> Int32:
    """Find the decoding sequences, then those that still compute the prompt of their one sample."""
    computing = [run.seq for run in running.prefilling if run.task.sample >= 0]
    return np.concatenate([running.rows, np.asarray(computing, dtype=np.int32)])


def forecast_running(running: RunningSet, seqs: Int32, remaining: Int32) -> UsageCurve:
    """Forecast pages in use at each step from the one being built.

    Args:
        running: the running set once the step's rows have the pages that they write to.
        seqs: of `find_running_seqs`. remaining: int32 [s], at least 1: steps for which each of them goes on.
    """
    table, size = running.table, running.cache.page_size
    position = _find_positions(running, seqs)
    held = -(-position // size) - table.num_shared[seqs]
    horizon = int(remaining.max(initial=1))
    ends, counts = _find_shared_ends(running, seqs, remaining)
    curve = forecast_own_pages(position, remaining, held, size, horizon) + forecast_shared_pages(ends, counts, horizon)
    return UsageCurve(curve.astype(np.float64), rest=float(counts[ends == FAR].sum()))


def forecast_windows(running: RunningSet, seqs: Int32, remaining: Int32) -> UsageCurve:
    """Forecast window pages in use at each step, as `forecast_running` does with the others."""
    assert running.windows is not None
    table, size, pool = running.table, running.cache.page_size, running.windows.pool
    position, horizon = _find_positions(running, seqs), int(remaining.max(initial=1))
    own = forecast_window_pages(position, remaining, table.num_shared[seqs], pool.window, size, horizon)
    last, counts = _find_window_ends(running, pool, seqs, position, remaining)
    curve = own + forecast_shared_pages(last, counts, horizon)
    return UsageCurve(curve.astype(np.float64), rest=float(counts[last == FAR].sum()))


def _find_window_ends(
    running: RunningSet, pool: WindowPool, seqs: Int32, position: Int32, remaining: Int32
) -> tuple[Int32, Int32]:
    """Find the ends of prompts' window pages, as `_find_shared_ends` does: when each of their sequences has passed."""
    table, num_keys = running.table, 1 + max(running.runs, default=0)
    lowest, longest = np.full(num_keys, FAR, np.int32), np.zeros(num_keys, np.int32)
    sees = pool.find_firsts(position) < table.num_shared[seqs]
    keys = table.prompt_key[seqs[sees]]
    np.minimum.at(lowest, keys, position[sees])
    np.maximum.at(longest, keys, remaining[sees])
    waiting = [*running.forking, *running.prefilling]
    for run in waiting:
        lowest[run.key], longest[run.key] = min(lowest[run.key], run.num_to_compute), FAR
    found = np.flatnonzero(longest)
    runs = [running.runs[key] for key in found.tolist()]
    sizes = np.fromiter((run.pages.size for run in runs), np.int32, len(runs))
    passed = sizes * pool.page_size + pool.window - 1 - lowest[found]  # the step before which the last is dropped
    ends = np.where(longest[found] == FAR, FAR, np.minimum(longest[found], passed)).astype(np.int32)
    firsts = np.minimum(pool.find_firsts(lowest[found]), sizes)
    tails = np.asarray([run.tail_page for run in waiting if run.tail_page >= 0], np.int32)
    pages = [run.pages[first:] for run, first in zip(runs, firsts.tolist(), strict=True)]
    until = np.concatenate([np.repeat(ends, sizes - firsts), np.full(tails.size, FAR, np.int32)])
    return count_last_uses(np.concatenate([*pages, tails]), until, running.cache.num_pages)


def _find_positions(running: RunningSet, seqs: Int32) -> Int32:
    """Find where the sequences of `find_running_seqs` decode next."""
    position: Int32 = running.table.position[seqs]
    computing = [run.num_to_compute for run in running.prefilling if run.task.sample >= 0]
    position[running.rows.size :] = computing  # their prompts hold all pages already, and decode soon
    return position


def _find_shared_ends(running: RunningSet, seqs: Int32, remaining: Int32) -> tuple[Int32, Int32]:
    """Find the ends of prompts' pages, each page counted once, and the number of pages for each end."""
    if not running.runs:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    keys = np.fromiter(running.runs, dtype=np.int32, count=len(running.runs))
    by_key = np.zeros(int(keys.max()) + 1, np.int32)
    np.maximum.at(by_key, running.table.prompt_key[seqs], remaining)
    by_key[[run.key for run in (*running.forking, *running.prefilling)]] = FAR
    ends = by_key[keys]
    runs = list(running.runs.values())
    pages = [runs[i].pages for i in np.argsort(ends, kind="stable").tolist()]
    sizes = np.fromiter(map(len, pages), dtype=np.int32, count=len(pages))
    tails = np.asarray([run.tail_page for run in runs if run.tail_page >= 0], dtype=np.int32)
    until = np.concatenate([np.repeat(np.sort(ends), sizes), np.full(tails.size, FAR)])
    return count_last_uses(np.concatenate([*pages, tails]), until.astype(np.int32), running.cache.num_pages)
