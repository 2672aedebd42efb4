"""Sends what streams have to say in rounds, so that events share their cost however many streams there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

MOST_SECONDS = 0.025  # the longest wait between two rounds; readers do not notice it
EVENT_SECONDS = 25e-6  # of sending an event, whatever it says


class Rounds:
    """Calls functions that each send one stream's events.

    After a round, the next waits for as long as the round took, MOST_SECONDS at most. What a stream says meanwhile
    shares an event, which costs the loop and the client little more than an event of one token. Tokens with log-probs
    cost much themselves, of which a wait saves nothing: so it is EVENT_SECONDS for each stream at most. uvloop waits
    for whole milliseconds, so that no wait of less than half of one follows a round, as few streams need.
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
