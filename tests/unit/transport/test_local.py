from __future__ import annotations

from toka_async.arrays import i32_column
from toka_async.messages import Cancels, DropStop, ToScheduler
from toka_async.transport.base import EveryOutbox, Inbox, Outbox
from toka_async.transport.codec import Codec
from toka_async.transport.local import LocalChannel


def test_messages_arrive_once_in_order_and_as_copies() -> None:
    channel: LocalChannel[ToScheduler] = LocalChannel(Codec(ToScheduler))
    outbox: Outbox[ToScheduler] = channel
    inbox: Inbox[ToScheduler] = channel
    first = Cancels(request_ids=i32_column([1, 2]))
    outbox.send(first)
    outbox.send(DropStop(stop_id=1))
    received = inbox.drain()
    assert received == [first, DropStop(stop_id=1)]
    assert received[0] is not first  # it went through the codec
    assert inbox.drain() == []


def test_a_closed_channel_holds_nothing() -> None:
    channel: LocalChannel[ToScheduler] = LocalChannel(Codec(ToScheduler))
    channel.send(DropStop(stop_id=1))
    channel.close()
    assert channel.drain() == []


def test_every_inbox_receives_what_is_sent_to_all() -> None:
    channels: list[LocalChannel[ToScheduler]] = [LocalChannel(Codec(ToScheduler)) for _ in range(3)]
    outbox: Outbox[ToScheduler] = EveryOutbox(channels)
    for request in (1, 2):
        outbox.send(DropStop(stop_id=request))
    assert [channel.drain() for channel in channels] == [[DropStop(stop_id=1), DropStop(stop_id=2)]] * 3
    outbox.send(DropStop(stop_id=3))
    outbox.close()
    assert [channel.drain() for channel in channels] == [[]] * 3
