"""The account of a client: nothing is lost, nothing runs twice, and memory is bounded, whatever the order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from toka_async.arrays import Bool
from toka_async.protocol import Pong
from toka_async.server.zmq.delivery import CreditError, Delivery, Outgoing

CREDIT = 6
SIZE = 256 + 128 + 16  # of a message with one row
MOST_REMEMBERED = 5 * SIZE


def message(*rows: tuple[int, int], ended: tuple[int, ...] = (), remember: bool = True) -> Outgoing:
    """Rows are (id, value)."""
    ids, values = np.asarray(rows, np.int64).reshape(-1, 2).T
    return Outgoing(Pong(), {"ids": ids, "seeds": values}, ids, list(ended), remember)


def part(whole: Outgoing, rows: Bool) -> Outgoing:
    columns = {name: values[rows] for name, values in whole.columns.items()}
    ended = [key for key in whole.ended if key in whole.ids[rows]]
    return Outgoing(whole.header, columns, whole.ids[rows], ended, remember=False)


def values_of(messages: list[Outgoing], key: int) -> list[int]:
    return [int(v) for each in messages for i, v in zip(each.ids, each.columns["seeds"], strict=True) if i == key]


def ids(*keys: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(keys, np.int64)


def test_a_request_runs_once() -> None:
    delivery = Delivery(4, 10_000)
    assert delivery.admit(ids(1, 2, 1))[0].tolist() == [True, True, False]
    assert delivery.admit(ids(2, 3))[0].tolist() == [False, True]
    delivery.add(message((2, 7), ended=(2,)))
    fresh, again = delivery.admit(ids(2))
    assert (fresh.tolist(), again) == ([False], [])
    assert delivery.num_used == 3
    delivery.acknowledge(1)
    assert delivery.num_used == 2
    fresh, again = delivery.admit(ids(2))
    assert (fresh.tolist(), again) == ([False], [2])
    (recalled,) = delivery.recall(again, part)
    assert values_of([recalled], 2) == [7]
    delivery.add(recalled)
    assert delivery.num_used == 3
    delivery.acknowledge(2)
    assert delivery.num_used == 2


def test_credit_is_all_or_nothing_and_comes_back_when_an_end_is_acknowledged() -> None:
    delivery = Delivery(2, 10_000)
    with pytest.raises(CreditError, match="credit of 2"):
        delivery.admit(ids(1, 2, 3))
    delivery.admit(ids(1, 2))
    delivery.add(message((1, 0), ended=(1,)))
    with pytest.raises(CreditError):
        delivery.admit(ids(3))
    delivery.acknowledge(1)
    assert delivery.admit(ids(3))[0].all()


def test_what_was_refused_may_be_tried_again() -> None:
    delivery = Delivery(2, 10_000)
    delivery.admit(ids(1))
    delivery.add(message((1, 0), ended=(1,), remember=False))
    assert not delivery.admit(ids(1))[0].any()
    delivery.acknowledge(1)
    assert delivery.admit(ids(1))[0].all()


def test_messages_are_kept_until_they_are_acknowledged() -> None:
    delivery = Delivery(2, 10_000)
    delivery.admit(ids(1))
    for value in range(3):
        delivery.add(message((1, value)))
    delivery.acknowledge(1)
    assert [each.seq for each in delivery.unconfirmed()] == [2, 3]
    assert not delivery.is_settled
    delivery.acknowledge(99)
    assert delivery.is_settled


@dataclass
class Run:
    """What a request has said."""

    values: list[int] = field(default_factory=list)
    ended: bool = False
    acknowledged: bool = False


class DeliveryMachine(RuleBasedStateMachine):
    """Against a model that keeps everything."""

    def __init__(self) -> None:
        super().__init__()
        self.delivery = Delivery(CREDIT, MOST_REMEMBERED)
        self.runs: dict[int, Run] = {}
        self.num_values = 0
        self.ended_in: dict[int, int] = {}  # seq of the message that ended the newest run

    @rule(keys=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def submit(self, keys: list[int]) -> None:
        before = dict(self.delivery.open)
        try:
            fresh, again = self.delivery.admit(ids(*keys))
        except CreditError:
            assert self.delivery.open == before
            return
        new = [key for key, is_new in zip(keys, fresh.tolist(), strict=True) if is_new]
        assert len(set(new)) == len(new)
        for key in new:
            run = self.runs.get(key)
            assert run is None or run.acknowledged, "it runs already, or its client does not know its end"
            self.runs[key] = Run()
        for key in again:
            assert self.runs[key].acknowledged
            recalled = self.delivery.recall([key], part)
            assert values_of(recalled, key) == self.runs[key].values, "all of it, and nothing of an older run"
            assert [end for each in recalled for end in each.ended] == [key]
            for each in recalled:
                self.delivery.add(each)

    @precondition(lambda self: self.delivery.open)
    @rule(data=st.data(), ends=st.booleans(), refused=st.booleans())
    def say(self, data: st.DataObject, ends: bool, refused: bool) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.delivery.open)), min_size=1, max_size=3, unique=True))
        rows = [(key, self.num_values + i) for i, key in enumerate(keys)]
        self.num_values += len(rows)
        refused = refused and ends
        sent = message(*rows, ended=tuple(keys) if ends else (), remember=not refused)
        self.delivery.add(sent)
        for key, value in rows:
            self.runs[key].values.append(value)
            if ends:
                self.runs[key].ended = True
                self.ended_in[key] = sent.seq

    @rule(seq=st.integers(0, 60))
    def acknowledge(self, seq: int) -> None:
        self.delivery.acknowledge(seq)
        for key, run in self.runs.items():
            run.acknowledged |= run.ended and self.ended_in[key] <= seq

    @invariant()
    def checked(self) -> None:
        self.delivery.check()
        is_open = {key for key, run in self.runs.items() if not run.ended}
        assert self.delivery.open.keys() == is_open


TestDelivery = DeliveryMachine.TestCase
TestDelivery.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
