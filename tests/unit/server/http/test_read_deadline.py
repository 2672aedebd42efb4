"""How long a part of a request may take: its bytes give it time, and time in which it could not arrive is not its."""

from __future__ import annotations

from toka_async.server.http.read_deadline import LEAST_RATE, Arrival


def test_bytes_give_time() -> None:
    arrival = Arrival(10.0)
    arrival.begin(5.0)
    assert arrival.deadline == 15.0
    arrival.num_bytes += 3 * LEAST_RATE
    assert arrival.deadline == 18.0
    arrival.begin(20.0)
    assert arrival.deadline == 30.0


def test_time_in_which_nothing_can_arrive_does_not_count() -> None:
    arrival = Arrival(10.0)
    arrival.begin(5.0)
    arrival.pause(7.0)
    arrival.pause(8.0)  # as before
    arrival.resume(27.0)
    arrival.resume(28.0)
    assert arrival.deadline == 35.0


def test_a_part_that_begins_while_nothing_can_arrive() -> None:
    arrival = Arrival(10.0)
    arrival.pause(1.0)
    arrival.begin(5.0)
    arrival.resume(6.0)
    assert arrival.deadline == 16.0
