"""The channel within one process."""

from __future__ import annotations

from toka_async.arrays import i32_column
from toka_async.messages import Cancel, SamplingParams, Submit, ToScheduler
from toka_async.transport.base import EveryOutbox, Inbox, Outbox
from toka_async.transport.codec import Codec
from toka_async.transport.local import LocalChannel


def test_messages_arrive_once_in_order_and_as_copies() -> None:
    channel: LocalChannel[ToScheduler] = LocalChannel(Codec(ToScheduler))
    outbox: Outbox[ToScheduler] = channel
    inbox: Inbox[ToScheduler] = channel
    first = Submit(request_id=1, prompt=i32_column([1, 2]), max_tokens=3, seed=4, sampling=SamplingParams())
    outbox.send(first)
    outbox.send(Cancel(request_id=1))
    received = inbox.drain()
    assert received == [first, Cancel(request_id=1)]
    assert received[0] is not first  # it went through the codec
    assert inbox.drain() == []


def test_a_closed_channel_holds_nothing() -> None:
    channel: LocalChannel[ToScheduler] = LocalChannel(Codec(ToScheduler))
    channel.send(Cancel(request_id=1))
    channel.close()
    assert channel.drain() == []


def test_every_inbox_receives_what_is_sent_to_all() -> None:
    channels: list[LocalChannel[ToScheduler]] = [LocalChannel(Codec(ToScheduler)) for _ in range(3)]
    outbox: Outbox[ToScheduler] = EveryOutbox(channels)
    for request in (1, 2):
        outbox.send(Cancel(request_id=request))
    assert [channel.drain() for channel in channels] == [[Cancel(request_id=1), Cancel(request_id=2)]] * 3
    outbox.send(Cancel(request_id=3))
    outbox.close()
    assert [channel.drain() for channel in channels] == [[]] * 3
