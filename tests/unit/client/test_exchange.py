"""The client's side of the protocol without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tests.cases.wire_messages import WELCOME
from toka_async.client.errors import ConnectionLostError, RequestError
from toka_async.client.exchange import MARGIN, Exchange
from toka_async.client.pending import News, Pending, RequestOptions
from toka_async.client.results import Result
from toka_async.protocol import (
    DTYPES,
    Ack,
    Buffer,
    Cancellation,
    Closed,
    Columns,
    Error,
    FromClient,
    FromServer,
    Hello,
    PromptLogprobs,
    ProtocolError,
    Results,
    Submission,
    from_client,
    pack,
)


@dataclass
class Wire:
    """An exchange and what it sends."""

    sent: list[tuple[FromClient, Columns]] = field(default_factory=list)
    retries: list[float] = field(default_factory=list)
    news: dict[int, News] = field(default_factory=dict)
    retries_requests: bool = True

    def __post_init__(self) -> None:
        self.exchange = Exchange(self._send, self.retries.append, retries=self.retries_requests)

    def _send(self, frames: Sequence[Buffer]) -> None:
        self.sent.append(from_client([bytes(frame) for frame in frames]))

    def tell(self, pending: Pending, news: News) -> None:
        self.news[pending.id] = news

    def say(self, header: FromServer, columns: Columns | None = None) -> None:
        self.exchange.on_frames(pack(header, columns))

    def welcome(self, *, resumed: bool = False, credit: int = 100, max_message: int = 1 << 20) -> None:
        self.exchange.introduce()
        self.say(replace(WELCOME, resumed=resumed, credit=credit, max_message=max_message))
        self.exchange.flush()

    def ask(self, *keys: int, length: int = 2, n: int = 1, stream: bool = False) -> list[Pending]:
        fields = {"n": n}
        options = RequestOptions(fields, msgspec.msgpack.encode(fields), stream)
        prompt = np.ones(length, np.int32)
        made = [Pending(key, prompt, 0, options, self) for key in keys]
        for pending in made:
            self.exchange.add(pending)
        self.exchange.flush()
        return made

    def result(self, seq: int, *keys: int, sample: int = 0) -> None:
        size = len(keys)
        columns: Columns = {
            "ids": np.asarray(keys),
            "samples": np.full(size, sample, np.int32),
            "counts": np.ones(size, np.int32),
            "reasons": np.full(size, 2, np.int32),
            "cached": np.zeros(size, np.int32),
            "token_ids": np.asarray(keys, np.int32),
        }
        self.say(Results(seq=seq, columns=tuple(columns)), columns)
        self.exchange.flush()

    def submitted(self) -> list[list[int]]:
        return [columns["ids"].tolist() for header, columns in self.sent if isinstance(header, Submission)]

    def error(self, seq: int, key: int, code: str) -> None:
        header = Error(seq=seq, status=400, code=code, param="n", message="no", retry_after=2.0, columns=("ids",))
        self.say(header, {"ids": np.asarray([key])})
        self.exchange.flush()


def welcomed(*, credit: int = 100, max_message: int = 1 << 20) -> Wire:
    wire = Wire()
    wire.welcome(credit=credit, max_message=max_message)
    return wire


def test_nothing_is_sent_before_the_welcome() -> None:
    wire = Wire()
    wire.ask(1, 2)
    assert wire.sent == []
    wire.welcome()
    assert isinstance(wire.sent[0][0], Hello)
    assert wire.submitted() == [[1, 2]]


def test_the_credit_is_respected_and_comes_back() -> None:
    wire = welcomed(credit=3)
    wire.ask(*range(5))
    assert wire.submitted() == [[0, 1, 2]]
    wire.result(1, 0, 2)
    assert wire.submitted() == [[0, 1, 2], [3, 4]]
    (submission,) = [header for header, columns in wire.sent[-1:] if isinstance(header, Submission)]
    assert submission.ack == 1
    wire.result(2, 1, 3, 4)
    assert [header.ack for header, _ in wire.sent if isinstance(header, Ack)] == [2]
    assert wire.exchange.num_open == 0


def test_messages_are_no_larger_than_the_server_takes() -> None:
    wire = welcomed(max_message=MARGIN + 100)
    wire.ask(1, 2, 3, length=12)
    assert wire.submitted() == [[1, 2], [3]]
    wire.ask(4, length=30)
    error = wire.news[4]
    assert isinstance(error, RequestError)
    assert (error.field, error.status) == ("prompt", 413)


def test_what_comes_twice_counts_once() -> None:
    wire = welcomed()
    wire.ask(1, n=2)
    wire.result(1, 1)
    wire.result(1, 1)
    assert not wire.news
    wire.result(2, 1, sample=1)
    result = wire.news[1]
    assert isinstance(result, Result)
    assert len(result.samples) == 2


def test_a_new_connection_says_what_was_received_and_asks_again() -> None:
    wire = welcomed()
    wire.ask(1, 2)
    wire.result(1, 1)
    wire.exchange.note_disconnected()
    wire.ask(3)
    wire.welcome(resumed=True)
    hello = [header for header, _ in wire.sent if isinstance(header, Hello)][-1]
    assert hello.received == 1
    assert hello.session == next(header.session for header, _ in wire.sent if isinstance(header, Hello))
    assert wire.submitted() == [[1, 2], [2], [3]]


def test_a_server_without_memory_counts_from_the_beginning() -> None:
    wire = welcomed()
    wire.ask(1, 2, n=2)
    wire.result(1, 1)
    wire.welcome(resumed=False)
    wire.result(1, 1)
    assert not wire.news, "the sample that came of the first run is not taken for the second's"
    wire.result(2, 1, sample=1)
    assert wire.news.keys() == {1}


@pytest.mark.parametrize("resumed", [False, True])
def test_an_abandoned_request_is_cancelled_also_over_a_new_connection(resumed: bool) -> None:
    wire = welcomed()
    (pending,) = wire.ask(1)
    wire.exchange.note_disconnected()
    wire.exchange.abandon(pending)
    wire.welcome(resumed=resumed)
    cancelled = [columns["ids"].tolist() for header, columns in wire.sent if isinstance(header, Cancellation)]
    assert cancelled == ([[1]] if resumed else [])
    assert wire.exchange.num_open == resumed
    if resumed:
        wire.error(1, 1, "cancelled")
    assert wire.exchange.num_open == 0
    assert not wire.news


def test_a_lost_stream_gives_no_credit_that_there_is_not() -> None:
    wire = welcomed(credit=2)
    wire.ask(1, n=2, stream=True)
    wire.result(1, 1)
    wire.ask(2, 3, 4, 5)
    wire.exchange.note_disconnected()
    wire.sent.clear()
    wire.welcome(credit=2)
    assert isinstance(wire.news[1], ConnectionLostError)
    assert wire.submitted() == [[2, 3]]


def test_what_the_server_may_have_is_submitted_again_first() -> None:
    wire = welcomed(credit=2)
    wire.ask(1, 2)
    wire.error(1, 1, "overloaded")
    wire.error(2, 2, "overloaded")
    wire.ask(3, 4)
    wire.exchange.note_disconnected()
    wire.sent.clear()
    wire.welcome(resumed=True, credit=2)
    assert wire.submitted() == [[3, 4]], "which the server counts already"


def test_an_abandoned_request_whose_submission_was_lost_gives_its_credit_back() -> None:
    wire = welcomed(credit=1)
    (pending,) = wire.ask(1)
    wire.exchange.note_disconnected()
    wire.exchange.abandon(pending)
    wire.sent.clear()
    wire.welcome(resumed=True, credit=1)
    assert wire.submitted() == [[1]], "a server that does not know it would not answer its cancellation"
    wire.ask(2)
    wire.error(1, 1, "cancelled")
    wire.exchange.flush()
    assert wire.submitted() == [[1], [2]]


def test_one_that_is_too_large_and_was_abandoned_is_passed_over() -> None:
    wire = welcomed(max_message=MARGIN + 40)
    pending = Pending(1, np.ones(20, np.int32), 0, RequestOptions({}, b"\x80", False), wire)
    wire.exchange.add(pending)
    wire.exchange.abandon(pending)
    wire.exchange.flush()
    assert not wire.news


def test_one_that_was_not_sent_needs_no_cancelling() -> None:
    wire = Wire()
    (pending,) = wire.ask(1)
    wire.exchange.abandon(pending)
    wire.welcome()
    assert wire.submitted() == []
    assert wire.exchange.num_open == 0


def test_what_passes_is_tried_again_later_and_what_does_not_is_told() -> None:
    wire = welcomed()
    wire.ask(1, 2, 3)
    wire.error(1, 1, "overloaded")
    wire.error(2, 2, "request_failed")
    assert wire.retries == [2.0]
    error = wire.news[2]
    assert isinstance(error, RequestError)
    assert (error.field, error.code, str(error)) == ("n", "request_failed", "no")
    assert wire.submitted() == [[1, 2, 3]]
    wire.result(3, 3)
    assert wire.submitted() == [[1, 2, 3], [1]]


def test_one_that_is_tried_again_begins_from_nothing() -> None:
    """Also when a part of it had come, as from a replica that is gone."""
    wire = welcomed()
    wire.ask(1, n=2)
    wire.result(1, 1)
    wire.error(2, 1, "not_serving")
    wire.exchange.retry()
    wire.exchange.flush()
    assert wire.submitted() == [[1], [1]]
    wire.result(3, 1)
    assert not wire.news
    wire.result(4, 1, sample=1)
    result = wire.news[1]
    assert isinstance(result, Result)
    assert len(result.samples) == 2


def test_a_stream_that_has_begun_is_not_tried_again() -> None:
    wire = welcomed()
    wire.ask(1, n=2, stream=True)
    wire.result(1, 1)
    wire.error(2, 1, "not_serving")
    assert isinstance(wire.news[1], RequestError)
    assert wire.retries == [2.0]
    assert wire.exchange.num_open == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"samples": [2]}, "samples"),
        ({"samples": [-1]}, "samples"),
        ({"reasons": [0]}, "reasons"),
        ({"reasons": [6]}, "reasons"),
        ({"reasons": [-1]}, "reasons"),
        ({"counts": [2]}, "counts"),
        ({"counts": [-1]}, "counts"),
        ({"counts": [1, 0]}, "counts"),
        ({"cached": None}, "cached"),
        ({"token_ids": None}, "token_ids"),
        ({"logprobs": [0.0, 0.0]}, "logprobs"),
        ({"stops": [0]}, "stops"),
        ({"texts": [0xE2], "text_lengths": [1]}, "texts"),
        ({"texts": [65], "text_lengths": [2]}, "text_lengths"),
        ({"texts": [65]}, "text_lengths"),
    ],
)
def test_results_that_do_not_fit_are_an_error_that_names_the_column(
    change: dict[str, list[int] | None], field: str
) -> None:
    wire = welcomed()
    wire.ask(1, n=2)
    good = {"ids": [1], "samples": [0], "counts": [1], "reasons": [2], "cached": [0], "token_ids": [7]}
    columns: dict[str, list[int] | None] = {**good, **change}
    made = {name: np.asarray(values, DTYPES[name]) for name, values in columns.items() if values is not None}
    with pytest.raises(ProtocolError) as caught:
        wire.exchange.on_frames(pack(Results(seq=1, columns=tuple(made)), made))
    assert caught.value.field == field
    assert not wire.news


def test_log_probs_that_do_not_fit_are_an_error() -> None:
    wire = welcomed()
    wire.ask(1)
    columns: Columns = {
        "logprobs": np.zeros(2, np.float32),
        "ranks": np.ones(2, np.int32),
        "top_ids": np.zeros(3, np.int32),
    }
    with pytest.raises(ProtocolError, match="top_logprobs"):
        wire.say(PromptLogprobs(seq=1, id=1, num_top=1, columns=tuple(columns)), columns)
    columns["top_logprobs"] = np.zeros(2, np.float32)
    with pytest.raises(ProtocolError, match="top_ids"):
        wire.say(PromptLogprobs(seq=2, id=1, num_top=1, columns=tuple(columns)), columns)
    columns |= {"top_ids": np.zeros(2, np.int32), "ranks": np.ones(1, np.int32)}
    with pytest.raises(ProtocolError, match="ranks"):
        wire.say(PromptLogprobs(seq=3, id=1, num_top=1, columns=tuple(columns)), columns)


def test_a_sample_that_ends_twice_is_an_error() -> None:
    wire = welcomed()
    wire.ask(1, n=2)
    wire.result(1, 1)
    with pytest.raises(ProtocolError, match="twice"):
        wire.result(2, 1)


def test_a_closed_session_begins_anew_unless_it_is_refused() -> None:
    wire = welcomed()
    wire.say(Closed(code="unknown", message="who?"))
    assert [type(header) for header, _ in wire.sent] == [Hello, Hello]
    wire.say(Closed(code="stopping", message="bye"))
    assert wire.retries == [1.0]
    with pytest.raises(ConnectionLostError, match="no version"):
        wire.say(Closed(code="refused", message="no version"))


def test_nonsense_of_a_server_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        Wire().exchange.on_frames([b"nonsense"])


def test_answers_to_what_was_left_of_a_connection_are_passed_over() -> None:
    """It is sent over the next one, before the hello: one hello is enough."""
    wire = welcomed()
    wire.ask(1)
    wire.exchange.note_disconnected()
    wire.exchange.introduce()
    for _ in range(3):
        wire.say(Closed(code="unknown", message="who?"))
    assert [type(header) for header, _ in wire.sent] == [Hello, Submission, Hello]


# ---- without retries: a pool begins requests again elsewhere


@pytest.mark.parametrize("code", ["overloaded", "not_serving"])
def test_without_retries_a_request_that_there_is_no_room_for_ends_with_the_error(code: str) -> None:
    wire = Wire(retries_requests=False)
    wire.welcome()
    wire.ask(1)
    wire.error(1, 1, code)
    news = wire.news[1]
    assert isinstance(news, RequestError)
    assert news.code == code
    assert wire.exchange.num_open == 0


def test_without_retries_a_forgotten_session_is_over() -> None:
    wire = Wire(retries_requests=False)
    wire.welcome()
    wire.welcome()  # nothing was asked yet
    wire.ask(1)
    wire.exchange.note_disconnected()
    wire.welcome(resumed=True)
    assert wire.submitted() == [[1], [1]]
    with pytest.raises(ConnectionLostError, match="forgotten"):
        wire.welcome()
    assert not wire.news


def test_without_retries_a_server_that_stops_is_over() -> None:
    wire = Wire(retries_requests=False)
    wire.welcome()
    with pytest.raises(ConnectionLostError, match="bye"):
        wire.say(Closed(code="stopping", message="bye"))
