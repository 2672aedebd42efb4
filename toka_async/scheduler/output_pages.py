"""Keeps the full pages of an ended sequence in the prefix tree, for the next turn of its conversation.

Optional work, done when there is time, and not for samples of n > 1, which nobody continues. Knows the running set.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32
from toka_async.scheduler.sequences.running import RunningSet


def cache_outputs(running: RunningSet, seqs: Int32) -> None:
    """Put full pages of sequences that hold them, and are their request's only sample, into the tree before release."""
    if not running.cache.prefix or not seqs.size:
        return
    table = running.table
    has_page = table.position[seqs] // running.cache.page_size > table.num_shared[seqs]
    for seq in seqs[has_page & table.holds[seqs] & table.single[seqs]].tolist():
        _cache_output(running, seq)


def _cache_output(running: RunningSet, seq: int) -> None:
    """Keep pages as far as their tokens are known and the steps that write them are built."""
    table, size = running.table, running.cache.page_size
    run = running.runs[int(table.prompt_key[seq])]
    if len(run.nodes) != run.pages.size or not run.computed:
        return  # the tree has other pages with the prompt's tokens
    tokens = np.concatenate([run.request.prompt, running.log.tail(seq, int(running.log.count[seq]))])
    num_full = min(tokens.size, int(table.position[seq])) // size
    own = running.cache.chains.collect(table.head[[seq]])[::-1]
    num_kept = 0
    for page in own[: max(0, num_full - run.pages.size)].tolist():
        start = (run.pages.size + num_kept) * size
        parent, salt = run.nodes[-1] if run.nodes else None, run.request.submit.salt
        node = running.cache.insert(parent, tokens[start : start + size], page, salt, run.epoch)
        if node is None:
            break
        run.nodes.append(node)
        num_kept += 1
    if num_kept:
        running.cache.chains.cut(own, num_kept)
        if num_kept == own.size:
            table.head[seq] = -1
