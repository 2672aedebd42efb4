"""Handles what steps sampled: logs tokens, finds ends, and sends tokens to the server.

Knows the running set and open requests; not how steps are built, nor what waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Float32, Int32, as_f32, as_i32
from toka_async.messages import Reason, StepDone
from toka_async.scheduler.aborts import send_ends
from toka_async.scheduler.admission.policy import Admission
from toka_async.scheduler.admission.preemption import Preemption
from toka_async.scheduler.builder import StepRecord
from toka_async.scheduler.output_pages import cache_outputs
from toka_async.scheduler.replies import Replies
from toka_async.scheduler.sequences.requests import Request
from toka_async.scheduler.sequences.running import RunningSet
from toka_async.scheduler.sequences.token_log import TokenColumns
from toka_async.scheduler.statistics import StatsSource
from toka_async.scheduler.stop_masks import StopTable


class ResultHandler:
    def __init__(
        self,
        running: RunningSet,
        requests: dict[int, Request],
        replies: Replies,
        stops: StopTable,
        admission: Admission,
        preemption: Preemption,
        stats: StatsSource,
    ) -> None:
        self._running = running
        self._requests = requests
        self._replies = replies
        self._stops = stops
        self._admission = admission
        self._preemption = preemption
        self._stats = stats

    def take_tokens(self, done: StepDone, record: StepRecord, has_time: bool) -> None:
        """Log the tokens of living rows, end those that end, and send what is due. `has_time` allows optional work."""
        table, log = self._running.table, self._running.log
        token_ids = as_i32(done.token_ids)
        assert token_ids.size == record.seqs.size
        if done.broken:
            self._end_broken(record.seqs[as_i32(done.broken)])
        alive = table.alive[record.seqs]
        seqs, tokens = record.seqs[alive], token_ids[alive]
        num_first = int(np.count_nonzero(table.alive[record.firsts])) if record.firsts.size else 0
        self._stats.count_tokens(token_ids.size, token_ids.size - seqs.size, num_first)
        for seq, since in record.resumed:
            if table.alive[seq]:
                self._stats.count_resumed(since)
        if not seqs.size:
            return
        logprobs = as_f32(done.logprobs)[alive] if done.logprobs else None
        kept = as_i32(done.kept)[alive] if done.kept else None
        masses = as_f32(done.masses)[alive] if done.kept else None
        log.append(seqs, tokens, logprobs, kept, masses)
        self._take_tops(done, record)
        stopped = table.find_ended(seqs, tokens)
        full = (table.remaining[seqs] == 0) & (table.last_step[seqs] == record.step_id)
        reasons = np.where(stopped, np.int32(Reason.STOP), np.where(full, np.int32(Reason.LENGTH), np.int32(0)))
        self._check_stops(seqs, tokens, reasons == 0)
        no_floats: Float32 = np.empty(0, np.float32)
        columns = TokenColumns(
            tokens,
            no_floats if logprobs is None else logprobs,
            np.empty(0, np.int32) if kept is None else kept,
            no_floats if masses is None else masses,
            log.version,
        )
        self._stream(seqs, columns, reasons.astype(np.int32))
        self._finish(seqs[reasons != 0], reasons[reasons != 0].astype(np.int32), has_time)

    def _check_stops(self, seqs: Int32, tokens: Int32, running: Bool) -> None:
        """Ask the server about rows that may have completed a stop string. It looks at streamed rows anyway."""
        table = self._running.table
        looked_at = running & (table.stop_row[seqs] >= 0) & ~table.stream[seqs]
        if not looked_at.any():
            return
        seqs, tokens = seqs[looked_at], tokens[looked_at]
        late_enough = self._running.log.count[seqs] >= table.min_tokens[seqs]
        hits = seqs[late_enough & self._stops.find_hits(table.stop_row[seqs], tokens)]
        if hits.size:
            windows = [self._stops.window(row) for row in table.stop_row[hits].tolist()]
            self._replies.add_stop_checks(hits, windows, self._running.log)

    def _stream(self, seqs: Int32, columns: TokenColumns, reasons: Int32) -> None:
        table = self._running.table
        chosen = table.stream[seqs]
        if not chosen.any():
            return
        seqs = seqs[chosen]
        tops = self._running.take_tops(seqs)
        counts = np.ones(seqs.size, np.int32)
        self._replies.add_rows(seqs, counts, columns.take(chosen, ()), reasons[chosen], tops)

    def _finish(self, seqs: Int32, reasons: Int32, has_time: bool) -> None:
        """End sequences that reached their end; those that are not streamed are sent whole."""
        if not seqs.size:
            return
        table = self._running.table
        if has_time:
            cache_outputs(self._running, seqs)
        self._admission.observe_ends(seqs, self._running.log.count[seqs], reasons == int(Reason.LENGTH))
        whole = ~table.stream[seqs]
        if whole.any():
            rows = seqs[whole]
            scored = bool((table.num_logprobs[rows] >= 0).any())
            counts, columns = self._running.log.take(rows, scored)
            tops = self._running.take_tops(rows)
            self._replies.add_rows(rows, counts, columns, reasons[whole], tops)
        requests = table.request[seqs]
        self.end_seqs(seqs)
        self.close_samples(requests)

    def _end_broken(self, seqs: Int32) -> None:
        """End sequences whose grammar failed, with the tokens that they have."""
        table = self._running.table
        seqs = seqs[table.alive[seqs]]
        if not seqs.size:
            return
        send_ends(seqs, Reason.ERROR, self._running, self._replies)
        requests = table.request[seqs]
        self.end_seqs(seqs)
        self.close_samples(requests)

    def end_seqs(self, seqs: Int32) -> None:
        """Drop the sequences' tokens and give back at once what they hold."""
        if not seqs.size:
            return
        running = self._running
        running.log.drop(seqs)
        running.take_tops(seqs)
        running.table.alive[seqs] = False
        running.release(seqs)
        running.retire(seqs, self._preemption.completed)

    def close_samples(self, requests: Int32) -> None:
        """Count one ended sample for each entry of `requests` (ids, with repeats)."""
        self._stats.num_open -= requests.size
        for request_id, count in Counter(requests.tolist()).items():
            request = self._requests[request_id]
            request.num_open -= count
            assert request.num_open >= 0
            if request.num_open == 0:
                self._admission.close_request(request)
                del self._requests[request_id]

    def take_scores(self, done: StepDone, record: StepRecord) -> None:
        for chunk in done.prompts:
            request = record.scored.get(chunk.slot)
            scores = request.scores if request else None
            if scores is None:
                continue  # sent already, before the request was preempted
            values = as_f32(chunk.logprobs)
            part = slice(chunk.start, chunk.start + values.size)
            scores.logprobs[part], scores.ranks[part] = values, as_i32(chunk.ranks)
            if chunk.num_top:
                scores.top_ids[part] = as_i32(chunk.top_ids).reshape(-1, chunk.num_top)
                scores.top_logprobs[part] = as_f32(chunk.top_logprobs).reshape(-1, chunk.num_top)

    def _take_tops(self, done: StepDone, record: StepRecord) -> None:
        if not done.top_rows:
            return
        counts, seqs = as_i32(done.top_counts), record.seqs[as_i32(done.top_rows)]
        ids, values = _split_rows(as_i32(done.top_ids), counts), _split_rows(as_f32(done.top_logprobs), counts)
        alive, tops = self._running.table.alive[seqs].tolist(), self._running.tops
        for seq, is_alive, top in zip(seqs.tolist(), alive, zip(ids, values, strict=True), strict=True):
            if is_alive:
                tops.setdefault(seq, []).append(top)


def _split_rows(values: npt.NDArray[Any], counts: Int32) -> Iterable[npt.NDArray[Any]]:
    """Cut `values` into rows of `counts`. Equal counts are common, and ten times as fast."""
    if (counts == counts[0]).all():
        return values.reshape(counts.size, -1)
    return np.split(values, np.cumsum(counts)[:-1])
