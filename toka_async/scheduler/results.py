"""Takes what steps sampled: logs tokens, finds ends, and says what is to be sent to the server.

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
from toka_async.scheduler.admission.policy import Admission
from toka_async.scheduler.admission.preemption import Preemption
from toka_async.scheduler.builder import StepRecord
from toka_async.scheduler.output_pages import cache_outputs
from toka_async.scheduler.replies import Replies
from toka_async.scheduler.sequences.requests import Request
from toka_async.scheduler.sequences.running import RunningSet
from toka_async.scheduler.statistics import StatsSource
from toka_async.scheduler.stop_masks import StopTable


class ResultHandler:
    """Samples from their tokens to their ends."""

    def __init__(
        self,
        running: RunningSet,
        requests: dict[int, Request],
        outbox: Replies,
        stops: StopTable,
        admission: Admission,
        preemption: Preemption,
        stats: StatsSource,
    ) -> None:
        self._running = running
        self._requests = requests
        self._outbox = outbox
        self._stops = stops
        self._admission = admission
        self._preemption = preemption
        self._stats = stats

    def take_tokens(self, done: StepDone, record: StepRecord, has_time: bool) -> None:
        """Log the tokens of rows that still live, end those that end, send what is to be sent now.

        With time, optional work is done too.
        """
        tables, log = self._running.lanes, self._running.log
        token_ids = as_i32(done.token_ids)
        assert token_ids.size == record.lanes.size
        alive = tables.alive[record.lanes]
        lanes, tokens = record.lanes[alive], token_ids[alive]
        num_first = int(np.count_nonzero(tables.alive[record.firsts])) if record.firsts.size else 0
        self._stats.computed(token_ids.size, token_ids.size - lanes.size, num_first)
        for lane, since in record.resumed:
            if tables.alive[lane]:
                self._stats.resumed(since)
        if not lanes.size:
            return
        logprobs = as_f32(done.logprobs)[alive] if done.logprobs else None
        log.append(lanes, tokens, logprobs)
        self._take_tops(done, record)
        stopped = tables.ended(lanes, tokens)
        full = (tables.remaining[lanes] == 0) & (tables.last_step[lanes] == record.step_id)
        reasons = np.where(stopped, np.int32(Reason.STOP), np.where(full, np.int32(Reason.LENGTH), np.int32(0)))
        self._check_stops(lanes, tokens, reasons == 0)
        self._stream(lanes, tokens, logprobs, reasons.astype(np.int32))
        self._finish(lanes[reasons != 0], reasons[reasons != 0].astype(np.int32), has_time)

    def _check_stops(self, lanes: Int32, tokens: Int32, running: Bool) -> None:
        """Streamed rows are looked at by the server anyway."""
        tables = self._running.lanes
        looked_at = running & (tables.stop_row[lanes] >= 0) & ~tables.stream[lanes]
        if not looked_at.any():
            return
        lanes, tokens = lanes[looked_at], tokens[looked_at]
        late_enough = self._running.log.count[lanes] >= tables.min_tokens[lanes]
        hits = lanes[late_enough & self._stops.hits(tables.stop_row[lanes], tokens)]
        if hits.size:
            windows = [self._stops.window(row) for row in tables.stop_row[hits].tolist()]
            self._outbox.stop_checks(hits, windows, self._running.log)

    def _stream(self, lanes: Int32, tokens: Int32, logprobs: Float32 | None, reasons: Int32) -> None:
        tables = self._running.lanes
        chosen = tables.stream[lanes]
        if not chosen.any():
            return
        lanes = lanes[chosen]
        values = np.zeros(lanes.size, np.float32) if logprobs is None else logprobs[chosen]
        tops = self._running.take_tops(lanes)
        self._outbox.rows(lanes, np.ones(lanes.size, np.int32), tokens[chosen], values, reasons[chosen], tops)

    def _finish(self, lanes: Int32, reasons: Int32, has_time: bool) -> None:
        """Lanes end by themselves: those not streamed are sent whole."""
        if not lanes.size:
            return
        tables = self._running.lanes
        if has_time:  # the ranks have work queued, so there is time for it
            cache_outputs(self._running, lanes)
        self._admission.ended(lanes, self._running.log.count[lanes], reasons == int(Reason.LENGTH))
        whole = ~tables.stream[lanes]
        if whole.any():
            rows = lanes[whole]
            scored = bool((tables.num_logprobs[rows] >= 0).any())
            counts, tokens, logprobs = self._running.log.take(rows, scored)
            tops = self._running.take_tops(rows)
            self._outbox.rows(rows, counts, tokens, logprobs, reasons[whole], tops)
        requests = tables.request[lanes]
        self.end_lanes(lanes)
        self.close_samples(requests)

    def end_lanes(self, lanes: Int32) -> None:
        """The lanes' tokens are no longer wanted; what they hold goes back at once."""
        if not lanes.size:
            return
        running = self._running
        running.log.drop(lanes)
        running.take_tops(lanes)
        running.lanes.alive[lanes] = False
        running.release(lanes)
        running.retire(lanes, self._preemption.completed)

    def close_samples(self, requests: Int32) -> None:
        """One sample of each of `requests` (ids, with repeats) has ended."""
        self._stats.num_open -= requests.size
        for request_id, count in Counter(requests.tolist()).items():
            request = self._requests[request_id]
            request.num_open -= count
            assert request.num_open >= 0
            if request.num_open == 0:
                self._admission.closed(request)
                del self._requests[request_id]

    def take_scores(self, done: StepDone, record: StepRecord) -> None:
        for chunk in done.prompts:
            request = record.scored.get(chunk.slot)
            scores = request.scores if request else None
            if scores is None:
                continue  # sent already: this is the prompt of a request that was preempted
            values = as_f32(chunk.logprobs)
            part = slice(chunk.start, chunk.start + values.size)
            scores.logprobs[part], scores.ranks[part] = values, as_i32(chunk.ranks)
            if chunk.num_top:
                scores.top_ids[part] = as_i32(chunk.top_ids).reshape(-1, chunk.num_top)
                scores.top_logprobs[part] = as_f32(chunk.top_logprobs).reshape(-1, chunk.num_top)

    def _take_tops(self, done: StepDone, record: StepRecord) -> None:
        if not done.top_rows:
            return
        counts, lanes = as_i32(done.top_counts), record.lanes[as_i32(done.top_rows)]
        ids, values = _rows(as_i32(done.top_ids), counts), _rows(as_f32(done.top_logprobs), counts)
        alive, tops = self._running.lanes.alive[lanes].tolist(), self._running.tops
        for lane, is_alive, top in zip(lanes.tolist(), alive, zip(ids, values, strict=True), strict=True):
            if is_alive:
                tops.setdefault(lane, []).append(top)


def _rows(values: npt.NDArray[Any], counts: Int32) -> Iterable[npt.NDArray[Any]]:
    """`values` cut into rows of `counts`; mostly all want the same number, and that is ten times as fast."""
    if (counts == counts[0]).all():
        return values.reshape(counts.size, -1)
    return np.split(values, np.cumsum(counts)[:-1])
