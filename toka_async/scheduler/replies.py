"""Messages to the server, collected until they are taken.

Rows of one Tokens message want the same number of log-probs, so that its columns are rectangular. Knows the columns of
the sequence table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from toka_async.arrays import EMPTY, Int32, column, i32_column
from toka_async.messages import Failed, Prefilled, Prefills, Reason, StopChecks, Tokens, ToServer
from toka_async.scheduler.sequences.requests import Generated, Request, Top
from toka_async.scheduler.sequences.sequence_table import SequenceTable
from toka_async.scheduler.sequences.token_log import TokenColumns, TokenLog

MOST_REQUESTS = 2048  # in a message, which the server handles in one turn of its event loop


class Replies:
    def __init__(self, table: SequenceTable, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._messages: list[ToServer] = []
        self._prefilled: list[tuple[int, int]] = []  # requests and their cached tokens; sent before all else

    @property
    def has_prefilled(self) -> bool:
        """Whether prompts were computed since the last `take`, apart from those with scores."""
        return bool(self._prefilled)

    def take(self) -> list[ToServer]:
        messages, self._messages = self._messages, []
        if self._prefilled:
            columns, self._prefilled = np.asarray(self._prefilled, np.int32).T, []
            parts = [columns[:, start : start + MOST_REQUESTS] for start in range(0, columns.shape[1], MOST_REQUESTS)]
            messages[:0] = [Prefills(request_ids=column(ids), cached_tokens=column(cached)) for ids, cached in parts]
        return messages

    def add_rows(
        self, seqs: Int32, counts: Int32, columns: TokenColumns, reasons: Int32, tops: dict[int, list[Top]]
    ) -> None:
        """Add rows of samples with `counts` tokens each, one row after the other in `columns`.

        `tops` holds, for sequences that want them, one entry of likeliest tokens for each token.
        """
        if seqs.size <= MOST_REQUESTS:
            self._add_tokens(seqs, counts, columns, reasons, tops)
            return
        starts = np.concatenate([[0], np.cumsum(counts)])
        for first, last in pairwise([0, *self._find_cuts(seqs), seqs.size]):
            part, tokens = slice(first, last), slice(starts[first], starts[last])
            self._add_tokens(seqs[part], counts[part], columns.take(tokens, range(first, last)), reasons[part], tops)

    def _find_cuts(self, seqs: Int32) -> list[int]:
        """Where further messages begin, so that none has more than MOST_REQUESTS requests."""
        numbers = np.cumsum(np.diff(self._table.request[seqs], prepend=-1) != 0)  # of each row's request, from 1
        cuts: list[int] = np.searchsorted(numbers, np.arange(MOST_REQUESTS, numbers[-1], MOST_REQUESTS) + 1).tolist()
        return cuts

    def _add_tokens(
        self, seqs: Int32, counts: Int32, columns: TokenColumns, reasons: Int32, tops: dict[int, list[Top]]
    ) -> None:
        """Do the work of `add_rows` for at most MOST_REQUESTS requests."""
        table = self._table
        wanted = 2 * table.num_logprobs[seqs] + table.wants_kept[seqs]
        for each in np.unique(wanted).tolist():
            chosen = wanted == each
            rows, own = seqs, columns
            if not chosen.all():
                rows, own = seqs[chosen], columns.take(np.repeat(chosen, counts), np.flatnonzero(chosen).tolist())
            num_logprobs, wants_kept = each >> 1, bool(each & 1)
            top = [entry for seq in rows.tolist() for entry in tops.get(seq, ())] if num_logprobs > 0 else []
            self._messages.append(
                Tokens(
                    request_ids=column(table.request[rows]),
                    samples=column(table.sample[rows]),
                    counts=column(counts[chosen]),
                    reasons=column(reasons[chosen]),
                    **self._pack_tokens(own, num_logprobs, wants_kept, top),
                )
            )

    def _pack_tokens(
        self, columns: TokenColumns, num_logprobs: int, wants_kept: bool, top: Sequence[Top]
    ) -> dict[str, Any]:
        """Make the fields of a Tokens message that say what its tokens are; `top`: of each token, if wanted."""
        num = columns.token_ids.size
        fields: dict[str, Any] = {
            "token_ids": column(columns.token_ids),
            "num_logprobs": num_logprobs,
            "versions": (columns.version,),
        }
        if num_logprobs >= 0:
            fields["logprobs"] = column(columns.logprobs if columns.logprobs.size else np.zeros(num, np.float32))
        if wants_kept:
            kept = columns.kept if columns.kept.size else np.zeros(num, np.int32)
            filtered = kept > 0
            fields["kept"] = column(np.where(filtered, kept, np.int32(self._vocab_size)))
            fields["masses"] = column(columns.masses if columns.masses.size else np.ones(num, np.float32))
        if top:
            fields["top_ids"] = column(np.concatenate([ids for ids, _ in top]))
            fields["top_logprobs"] = column(np.concatenate([values for _, values in top]))
        if columns.spans:
            numbers = {columns.version: 0}
            spans = [
                (row, end, numbers.setdefault(version, len(numbers)))
                for row, of_row in columns.spans.items()
                for end, version in of_row
            ]
            fields |= {"versions": tuple(numbers), "spans": column(np.asarray(spans, np.int32))}
        return fields

    def add_ends(self, request: Request, samples: Int32, reason: Reason) -> None:
        zeros = np.zeros(samples.size, np.int32)
        self._messages.append(
            Tokens(
                request_ids=column(zeros + request.request_id),
                samples=column(samples),
                counts=column(zeros),
                reasons=column(zeros + int(reason)),
                token_ids=EMPTY,
                num_logprobs=request.submit.sampling.num_logprobs,
            )
        )

    def add_waiting_end(self, request: Request, sample: int, count: int, generated: Generated, reason: Reason) -> None:
        """End a preempted sample that waits, with the first `count` of its tokens."""
        sampling = request.submit.sampling
        tops = (generated.tops or [])[:count] if sampling.num_logprobs > 0 else []
        self._messages.append(
            Tokens(
                request_ids=i32_column([request.request_id]),
                samples=i32_column([sample]),
                counts=i32_column([count]),
                reasons=i32_column([reason]),
                **self._pack_tokens(generated.columns.cut(count), sampling.num_logprobs, sampling.wants_kept, tops),
            )
        )

    def add_prefilled(self, request: Request) -> None:
        """Tell that the request's prompt is computed, with its scores."""
        scores, cached_tokens = request.scores, max(0, request.num_found)
        request.scores, request.prefilled = None, True
        if scores is None:
            self._prefilled.append((request.request_id, cached_tokens))
            return
        self._messages.append(
            Prefilled(
                request_id=request.request_id,
                cached_tokens=cached_tokens,
                logprobs=column(scores.logprobs),
                ranks=column(scores.ranks),
                top_ids=column(scores.top_ids),
                top_logprobs=column(scores.top_logprobs),
            )
        )

    def add_stop_checks(self, seqs: Int32, windows: list[int], log: TokenLog) -> None:
        """Ask whether the newest tokens of the sequences complete a stop string."""
        tails = [log.tail(seq, window) for seq, window in zip(seqs.tolist(), windows, strict=True)]
        self._messages.append(
            StopChecks(
                request_ids=column(self._table.request[seqs]),
                samples=column(self._table.sample[seqs]),
                num_tokens=column(log.count[seqs]),
                counts=column(np.asarray([tail.size for tail in tails], dtype=np.int32)),
                token_ids=column(np.concatenate(tails)),
            )
        )

    def add_failure(self, request_id: int, message: str) -> None:
        self._messages.append(Failed(request_id=request_id, message=message))

    def add(self, message: ToServer) -> None:
        self._messages.append(message)

    def add_all(self, messages: Sequence[ToServer]) -> None:
        self._messages.extend(messages)
