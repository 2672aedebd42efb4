"""Sends what streams have to say in rounds: what a stream says between two of them is one event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

MOST_SECONDS = 0.025  # the longest wait between two rounds; readers do not notice it
EVENT_SECONDS = 25e-6  # what sending an event takes, whatever it says


class Rounds:
    """Calls functions that each send one stream's events.

    After a round, the next waits for as long as the round took: an event of several tokens costs the loop and the
    client little more than an event of one. It waits for no longer than MOST_SECONDS, nor than EVENT_SECONDS for each
    stream, since a wait saves events alone: tokens with log-probs take most of a round, and cost the same in any event.
    uvloop rounds to milliseconds, so that a round of few streams is followed by no wait, as they need.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._earliest = 0.0  # when the next round may begin

    def add(self, send: Callable[[], None]) -> None:
        """Has `send` called in the next round, in a later turn of the event loop. Its errors end nothing else."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(max(0.0, self._earliest - monotonic()), self._send)
        self._waiting.append(send)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        begin = monotonic()
        for send in waiting:
            try:
                send()
            except Exception as error:
                context = {"message": "a stream's events could not be sent", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
        end = monotonic()
        self._earliest = end + min(end - begin, EVENT_SECONDS * len(waiting), MOST_SECONDS)
