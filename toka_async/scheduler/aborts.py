"""Ends requests early with `Reason.ABORT` and the tokens that they have; the caller forgets them afterwards.

Tokens of steps that are still on their way are not waited for. Knows the running set; not how steps are built.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toka_async.arrays import Int32
from toka_async.messages import Reason
from toka_async.scheduler.replies import Replies
from toka_async.scheduler.sequences.requests import Request
from toka_async.scheduler.sequences.running import RunningSet
from toka_async.scheduler.sequences.token_log import TokenColumns

NO_TOKENS = TokenColumns(np.empty(0, np.int32))


def send_aborted(requests: Sequence[Request], running: RunningSet, replies: Replies) -> None:
    """Send the end of every sample of the requests that has not ended. Streamed ones have sent their tokens before."""
    table = running.table
    ids = np.asarray([request.request_id for request in requests], np.int32)
    seqs = np.flatnonzero(table.alive & (table.sample >= 0) & np.isin(table.request, ids)).astype(np.int32)
    send_ends(seqs, Reason.ABORT, running, replies)
    num_ended = seqs.size
    for request in requests:
        num_ended += _send_waiting(request, replies)
    assert num_ended == sum(request.num_open for request in requests)


def send_ends(seqs: Int32, reason: Reason, running: RunningSet, replies: Replies) -> None:
    """Send that running sequences end now, with the tokens that they have. Streamed ones have sent theirs before."""
    streams = running.table.stream[seqs]
    if (whole := seqs[~streams]).size:
        counts, columns = running.log.take(whole)
        reasons = np.full(whole.size, reason, np.int32)
        replies.add_rows(whole, counts, columns, reasons, running.take_tops(whole))
    if (streamed := seqs[streams]).size:
        zeros, reasons = np.zeros(streamed.size, np.int32), np.full(streamed.size, reason, np.int32)
        replies.add_rows(streamed, zeros, NO_TOKENS, reasons, {})


def _send_waiting(request: Request, replies: Replies) -> int:
    """Send the ends of samples that no sequence computes; returns their number."""
    ends: list[int] = []
    num_sent = 0
    for task in request.waiting.values():
        if task.sample < 0:
            continue
        if task.generated is None or request.submit.stream:
            ends.append(task.sample)
        else:
            replies.add_waiting_end(request, task.sample, task.generated.tokens.size, task.generated, Reason.ABORT)
            num_sent += 1
    if request.submit.n > 1 or request.is_prompt_only:
        ends += range(request.next_sample, request.submit.n)
    if ends:
        replies.add_ends(request, np.asarray(ends, np.int32), Reason.ABORT)
    return num_sent + len(ends)
