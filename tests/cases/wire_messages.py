"""Messages of direct submission, right and almost right, as hypothesis makes them; and a client to hear them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from tests.cases.wire import FRAMES, VALUES, WORDS, Frames, mutated
from tests.drivers.direct import SESSION
from toka_async.client.errors import ConnectionLostError
from toka_async.client.exchange import Exchange
from toka_async.client.pending import News, Pending, RequestOptions
from toka_async.client.results import Event, Result
from toka_async.openai.requests import DirectRequest
from toka_async.protocol import (
    Ack,
    Buffer,
    Bye,
    Cancellation,
    Closed,
    Columns,
    Error,
    Header,
    Hello,
    Ping,
    Pong,
    PromptLogprobs,
    ProtocolError,
    Results,
    Submission,
    Welcome,
    pack,
)


def frames_of(header: Header, columns: Columns | None = None) -> Frames:
    return [bytes(frame) for frame in pack(header, columns)]


# ---- what clients say


NAMES = st.sampled_from(DirectRequest.__struct_encode_fields__)
ASKED: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 8)},
    optional={
        "text": st.booleans(),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "stop": st.just(["e", "x"]),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
        "temperature": st.floats(0, 2),
        "priority": st.integers(-5, 5),
    },
)
WISHES = ASKED | st.dictionaries(NAMES | WORDS, VALUES, max_size=3)


def submission(ids: list[int], lengths: list[int], fields: Mapping[str, object], text: bool, seeds: bool) -> Frames:
    lengths = [*lengths, *[1] * len(ids)][: len(ids)]
    columns: Columns = {"ids": np.asarray(ids, np.int64), "lengths": np.asarray(lengths, np.int32)}
    if text:
        columns["texts"] = np.full(sum(lengths), ord("e"), np.uint8)
    else:
        columns["prompts"] = np.full(sum(lengths), 7, np.int32)
    if seeds:
        columns["seeds"] = np.asarray(ids, np.int64)
    raw = msgspec.Raw(msgspec.msgpack.encode(fields))
    return frames_of(Submission(fields=raw, columns=tuple(columns)), columns)


IDS = st.lists(st.integers(0, 9), max_size=4)
_SAID = st.one_of(
    st.builds(submission, IDS, st.lists(st.integers(0, 5), max_size=4), WISHES, st.booleans(), st.booleans()),
    st.builds(submission, IDS, st.lists(st.integers(0, 600), max_size=4), ASKED, st.booleans(), st.booleans()),
    st.builds(lambda ids: frames_of(Cancellation(columns=("ids",)), {"ids": np.asarray(ids, np.int64)}), IDS),
    st.builds(lambda seq: frames_of(Ack(ack=seq)), st.integers(0, 2**63 - 1)),
    st.builds(
        lambda versions, session: frames_of(Hello(versions=tuple(versions), session=session)),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.sampled_from([SESSION, b"other" * 4]),
    ),
    st.sampled_from([frames_of(Ping()), frames_of(Bye())]),
)
SAID = st.lists(mutated(_SAID) | FRAMES, min_size=1, max_size=4)  # messages of a client, or nearly


# ---- what servers say


WELCOME = Welcome(
    version=3,
    resumed=True,
    credit=100,
    window=8,
    heartbeat=9.0,
    max_seqs=8,
    model="tiny",
    vocab_size=9,
    max_context=9,
    max_n=9,
    max_message=1 << 20,
)
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "stop": ["a", "b"], "stop_token_ids": [4]},
    {"n": 2, "stream": True, "stop": "a"},
)


def results(ids: Sequence[int], samples: Sequence[int], reasons: Sequence[int], num_top: int, text: bool) -> Frames:
    """Rows of two tokens each."""
    size = len(ids)
    columns: Columns = {
        "ids": np.asarray(ids, np.int64),
        "samples": np.asarray(samples, np.int32),
        "counts": np.full(size, 2, np.int32),
        "reasons": np.asarray(reasons, np.int32),
        "cached": np.zeros(size, np.int32),
        "token_ids": np.full(2 * size, 4, np.int32),
    }
    if num_top:
        columns["logprobs"] = np.zeros(2 * size, np.float32)
        columns["top_ids"] = np.zeros(2 * size * num_top, np.int32)
        columns["top_logprobs"] = np.zeros(2 * size * num_top, np.float32)
    if text:
        columns["text_lengths"] = np.full(size, 3, np.int32)
        columns["texts"] = np.frombuffer("\u20ac".encode() * size, np.uint8)
        columns["stops"] = np.full(size, -1, np.int32)
    return frames_of(Results(seq=1, num_top=num_top, columns=tuple(columns)), columns)


def prompt(key: int, num_top: int) -> Frames:
    columns: Columns = {
        "logprobs": np.zeros(1, np.float32),
        "ranks": np.ones(1, np.int32),
        "top_ids": np.zeros(num_top, np.int32),
        "top_logprobs": np.zeros(num_top, np.float32),
    }
    return frames_of(PromptLogprobs(seq=1, id=key, num_top=num_top, columns=tuple(columns)), columns)


def error(code: str, retry_after: float | None) -> Frames:
    header = Error(seq=1, status=429, code=code, message="no", retry_after=retry_after, columns=("ids",))
    return frames_of(header, {"ids": np.asarray([0, 1])})


_HEARD = st.one_of(
    st.builds(
        results,
        st.just([0, 1, 2]),
        st.lists(st.integers(0, 1), min_size=3, max_size=3),
        st.lists(st.integers(0, 3), min_size=3, max_size=3),
        st.integers(0, 2),
        st.booleans(),
    ),
    st.builds(prompt, st.integers(0, 2), st.integers(0, 2)),
    st.builds(error, st.sampled_from(["overloaded", "not_serving", "request_failed"]), st.none() | st.floats(0, 9)),
    st.sampled_from([frames_of(WELCOME), frames_of(Pong()), frames_of(Closed(code="stopping", message="x"))]),
)
HEARD = st.lists(mutated(_HEARD) | FRAMES, min_size=1, max_size=3)  # messages of a server, or nearly


class Client:
    """An exchange with three requests on their way: of one sample, of two, and streamed."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.retries: list[float] = []
        self.exchange = Exchange(self._send, self.retries.append)
        self.exchange.introduce()
        self.exchange.on_frames(frames_of(WELCOME))
        for key, fields in enumerate(FIELDS):
            options = RequestOptions(fields, msgspec.msgpack.encode(fields), "stream" in fields)
            self.exchange.add(Pending(key, np.ones(2, np.int32), 0, options, self))
        self.exchange.flush()

    def _send(self, frames: Sequence[Buffer]) -> bool:
        return bool(frames)

    def tell(self, pending: Pending, news: News) -> None:
        assert not isinstance(news, Result) or len(news.samples) == pending.options.n
        if isinstance(news, Event):
            assert 0 <= news.sample < pending.options.n
        self.news.append(news)

    def hear(self, messages: list[Frames]) -> None:
        """Takes them, and fails when anything but a ProtocolError comes of it."""
        for frames in messages:
            try:
                self.exchange.on_frames(frames)
            except (ProtocolError, ConnectionLostError) as error:
                self.exchange.fail_all(error)
            self.exchange.retry()
            self.exchange.flush()
        assert all(0 <= seconds <= 86400 for seconds in self.retries)
        self.exchange.fail_all(ProtocolError("over"))
        assert not self.exchange.num_open
