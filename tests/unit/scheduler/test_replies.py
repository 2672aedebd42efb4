from __future__ import annotations

import numpy as np
import pytest

from tests.cases.columns import ids
from tests.drivers.page_rank import submit
from toka_async.arrays import Float32, Int32, as_f32, as_i32
from toka_async.messages import Failed, Prefilled, Prefills, Reason, StopChecks, Tokens, TokenSampling
from toka_async.scheduler.replies import Replies
from toka_async.scheduler.sequences.requests import Generated, PrefillScores, Request
from toka_async.scheduler.sequences.sequence_table import SequenceTable
from toka_async.scheduler.sequences.token_log import TokenColumns, TokenLog


def floats(*values: float) -> Float32:
    return np.asarray(values, dtype=np.float32)


def seqs_wanting(*num_logprobs: int) -> tuple[SequenceTable, Int32]:
    table = SequenceTable(len(num_logprobs))
    taken = table.take(len(num_logprobs))
    table.request[taken] = 100 + np.arange(taken.size)
    table.sample[taken] = np.arange(taken.size)
    table.num_logprobs[taken] = num_logprobs
    return table, taken


def request(num_logprobs: int = -1, n: int = 1) -> Request:
    message = submit(7, [1, 2], n=n, sampling=TokenSampling(num_logprobs=num_logprobs))
    return Request(message, ids(1, 2), 0, n)


def only(replies: Replies) -> Tokens:
    (message,) = replies.take()
    assert isinstance(message, Tokens)
    return message


def test_rows_of_a_message_want_the_same_logprobs() -> None:
    table, taken = seqs_wanting(-1, 2, 0, -1)
    replies = Replies(table, 1000)
    tops = {int(taken[1]): [(ids(3, 4), floats(-1, -2)), (ids(5, 6), floats(-3, -4))]}
    logprobs = floats(-1, -2, -3, -4, -5, -6)
    columns = TokenColumns(ids(10, 20, 21, 30, 40, 41), logprobs)
    replies.add_rows(taken, ids(1, 2, 1, 2), columns, ids(0, 1, 2, 0), tops)
    plain, chosen, top = replies.take()
    assert isinstance(plain, Tokens)
    assert isinstance(chosen, Tokens)
    assert isinstance(top, Tokens)
    assert as_i32(plain.request_ids).tolist() == [100, 103]
    assert as_i32(plain.samples).tolist() == [0, 3]
    assert as_i32(plain.counts).tolist() == [1, 2]
    assert as_i32(plain.token_ids).tolist() == [10, 40, 41]
    assert len(plain.logprobs) == 0
    assert as_i32(chosen.reasons).tolist() == [2]
    assert as_f32(chosen.logprobs).tolist() == [-4]
    assert len(chosen.top_ids) == 0
    assert as_i32(top.token_ids).tolist() == [20, 21]
    assert as_i32(top.top_ids).reshape(2, 2).tolist() == [[3, 4], [5, 6]]
    assert as_f32(top.top_logprobs).tolist() == [-1, -2, -3, -4]


def test_what_filters_keep_goes_to_those_who_want_it() -> None:
    table, taken = seqs_wanting(0, 0, -1)
    table.wants_kept[taken[1]] = True
    replies = Replies(table, 1000)
    columns = TokenColumns(ids(1, 2, 3, 4), floats(-1, -2, -3, -4), ids(9, 5, 0, 9), floats(0.5, 0.25, 1, 0.5))
    replies.add_rows(taken, ids(1, 2, 1), columns, ids(0, 0, 0), {})
    _, plain, wanting = replies.take()
    assert isinstance(plain, Tokens)
    assert isinstance(wanting, Tokens)
    assert len(plain.kept) == len(plain.masses) == 0
    assert as_i32(wanting.kept).tolist() == [5, 1000]  # without filters, the whole vocabulary
    assert as_f32(wanting.masses).tolist() == [0.25, 1]
    replies.add_rows(taken[1:2], ids(1), TokenColumns(ids(1)), ids(0), {})
    assert as_i32(only(replies).kept).tolist() == [1000]


def test_versions_of_rows_are_those_of_their_message() -> None:
    table, taken = seqs_wanting(-1, 0, -1)
    replies = Replies(table, 1000)
    spans = {0: [(1, "a")], 1: [(1, "b")], 2: [(1, "a"), (2, "c")]}
    columns = TokenColumns(ids(*range(6)), floats(*range(6)), version="c", spans=spans)
    replies.add_rows(taken, ids(1, 2, 3), columns, ids(0, 0, 0), {})
    plain, scored = replies.take()
    assert isinstance(plain, Tokens)
    assert isinstance(scored, Tokens)
    assert plain.versions == ("c", "a")
    assert as_i32(plain.spans).reshape(-1, 3).tolist() == [[0, 1, 1], [1, 1, 1], [1, 2, 0]]
    assert scored.versions == ("c", "b")
    assert as_i32(scored.spans).reshape(-1, 3).tolist() == [[0, 1, 1]]


def test_messages_are_taken_once_and_in_order() -> None:
    table, _ = seqs_wanting(-1)
    replies = Replies(table, 1000)
    replies.add_failure(3, "no")
    replies.add_failure(4, "no")
    assert replies.take() == [Failed(request_id=3, message="no"), Failed(request_id=4, message="no")]
    assert replies.take() == []


def test_prompts_without_scores_are_told_of_together_and_before_all_else() -> None:
    table, _ = seqs_wanting(-1)
    replies, found = Replies(table, 1000), request()
    replies.add_failure(3, "no")
    found.num_found = 16
    replies.add_prefilled(found)
    replies.add_prefilled(request())
    prefills, failed = replies.take()
    assert isinstance(failed, Failed)
    assert isinstance(prefills, Prefills)
    assert as_i32(prefills.request_ids).tolist() == [7, 7]
    assert as_i32(prefills.cached_tokens).tolist() == [16, 0]
    assert replies.take() == []


def test_prefilled_carries_scores_once_and_lets_go_of_them() -> None:
    table, _ = seqs_wanting(-1)
    replies, scored = Replies(table, 1000), request()
    scored.scores = PrefillScores(floats(-1), ids(3), ids(5).reshape(1, 1), floats(-2).reshape(1, 1))
    scored.num_found = 8
    replies.add_prefilled(scored)
    (message,) = replies.take()
    assert isinstance(message, Prefilled)
    assert message.cached_tokens == 8
    assert as_f32(message.logprobs).tolist() == [-1]
    assert as_i32(message.ranks).tolist() == [3]
    assert as_i32(message.top_ids).tolist() == [5]
    assert scored.prefilled
    replies.add_prefilled(scored)
    (again,) = replies.take()
    assert isinstance(again, Prefills)


def test_ends_have_no_tokens() -> None:
    table, _ = seqs_wanting(-1)
    replies = Replies(table, 1000)
    replies.add_ends(request(n=3), ids(0, 2), Reason.LENGTH)
    message = only(replies)
    assert as_i32(message.request_ids).tolist() == [7, 7]
    assert as_i32(message.samples).tolist() == [0, 2]
    assert as_i32(message.reasons).tolist() == [Reason.LENGTH] * 2
    assert as_i32(message.counts).tolist() == [0, 0]
    assert len(message.token_ids) == 0


def test_a_waiting_sample_ends_with_its_first_tokens() -> None:
    table, _ = seqs_wanting(-1)
    replies = Replies(table, 1000)
    tops = [(ids(k), floats(-k)) for k in range(3)]
    generated = Generated(TokenColumns(ids(4, 5, 6), floats(-1, -2, -3)), tops)
    replies.add_waiting_end(request(num_logprobs=1), 2, 2, generated, Reason.STOP_STRING)
    message = only(replies)
    assert as_i32(message.samples).tolist() == [2]
    assert as_i32(message.reasons).tolist() == [Reason.STOP_STRING]
    assert as_i32(message.token_ids).tolist() == [4, 5]
    assert as_f32(message.logprobs).tolist() == [-1, -2]
    assert as_i32(message.top_ids).tolist() == [0, 1]
    assert message.num_logprobs == 1


def test_stop_checks_hold_the_windows_of_their_sequences() -> None:
    table, taken = seqs_wanting(-1, -1)
    replies, log = Replies(table, 1000), TokenLog(2)
    for k in range(5):
        log.append(taken, ids(k, 10 + k), None)
    log.append(taken[:1], ids(5), None)
    replies.add_stop_checks(taken, [3, 9], log)
    (message,) = replies.take()
    assert isinstance(message, StopChecks)
    assert as_i32(message.request_ids).tolist() == [100, 101]
    assert as_i32(message.num_tokens).tolist() == [6, 5]
    assert as_i32(message.counts).tolist() == [3, 5]
    assert as_i32(message.token_ids).tolist() == [3, 4, 5, 10, 11, 12, 13, 14]


def test_a_message_has_rows_of_so_many_requests_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toka_async.scheduler.replies.MOST_REQUESTS", 2)
    table, taken = seqs_wanting(*[1] * 7)
    table.request[taken] = [5, 5, 5, 6, 7, 8, 9]
    replies = Replies(table, 1000)
    tops = {seq: [(ids(place), floats(-place))] * place for place, seq in enumerate(taken.tolist())}
    tokens = ids(*[place for place in range(7) for _ in range(place)])
    columns = TokenColumns(tokens, -tokens.astype(np.float32))
    replies.add_rows(taken, ids(*range(7)), columns, ids(*range(7)), tops)
    messages = [message for message in replies.take() if isinstance(message, Tokens)]
    assert [as_i32(message.request_ids).tolist() for message in messages] == [[5, 5, 5, 6], [7, 8], [9]]
    assert [as_i32(message.counts).tolist() for message in messages] == [[0, 1, 2, 3], [4, 5], [6]]
    assert [as_i32(message.reasons).tolist() for message in messages] == [[0, 1, 2, 3], [4, 5], [6]]
    assert np.concatenate([as_i32(message.token_ids) for message in messages]).tolist() == tokens.tolist()
    assert np.concatenate([as_i32(message.top_ids) for message in messages]).tolist() == tokens.tolist()
    assert np.concatenate([as_f32(message.logprobs) for message in messages]).tolist() == (-tokens).tolist()
    replies.add_rows(taken[:0], ids(), TokenColumns(ids(), floats()), ids(), {})
    assert replies.take() == []


def test_so_are_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toka_async.scheduler.replies.MOST_REQUESTS", 2)
    replies = Replies(seqs_wanting(-1)[0], 1000)
    for _ in range(5):
        replies.add_prefilled(request())
    replies.add_failure(3, "x")
    *prefills, failed = replies.take()
    assert isinstance(failed, Failed)
    assert [as_i32(each.request_ids).tolist() for each in prefills if isinstance(each, Prefills)] == [
        [7, 7],
        [7, 7],
        [7],
    ]
