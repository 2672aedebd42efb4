"""Keeps the full pages of an ended sequence in the prefix tree, for the next turn of its conversation.

Optional work, done when there is time, and not for the samples of n > 1, which nobody continues. Knows the running set.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32
from toka_async.scheduler.sequences.running import RunningSet


def cache_outputs(running: RunningSet, lanes: Int32) -> None:
    """Put the full pages of those lanes that still hold theirs, and that are their request's only one, into the tree.

    To be called before the lanes are released. The pages stay owned until then.
    """
    if not running.cache.prefix or not lanes.size:
        return
    tables = running.lanes
    has_page = tables.position[lanes] // running.cache.page_size > tables.num_shared[lanes]
    for lane in lanes[has_page & tables.holds[lanes] & tables.single[lanes]].tolist():
        _cache_output(running, lane)


def _cache_output(running: RunningSet, lane: int) -> None:
    """Pages are kept as far as both their tokens are known and the steps that write them are built."""
    tables, size = running.lanes, running.cache.page_size
    run = running.runs[int(tables.prompt_key[lane])]
    if len(run.nodes) != run.pages.size or not run.computed:
        return  # the tree has other pages with the prompt's tokens
    tokens = np.concatenate([run.request.prompt, running.log.tail(lane, int(running.log.count[lane]))])
    num_full = min(tokens.size, int(tables.position[lane])) // size
    own = running.cache.chains.collect(tables.head[[lane]])[::-1]
    num_kept = 0
    for page in own[: max(0, num_full - run.pages.size)].tolist():
        start = (run.pages.size + num_kept) * size
        parent, salt = run.nodes[-1] if run.nodes else None, run.request.submit.salt
        node = running.cache.tree.insert(parent, tokens[start : start + size], page, salt)
        if node is None:
            break
        run.nodes.append(node)
        num_kept += 1
    if num_kept:
        running.cache.chains.cut(own, num_kept)
        if num_kept == own.size:
            tables.head[lane] = -1
