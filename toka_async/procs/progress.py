"""Whether a process gets on with its work: how much was begun, how much has ended, and when that last changed.

One thread may begin, another may end, a third may ask. Knows nothing of the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from toka_async.procs.child import Alive, ParentLink


class WorkProgress:
    """Pieces of work that end in the order in which they begin. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_begun = 0  # each written by one thread only
        self._num_ended = 0
        self._moved = clock()

    def begin(self) -> None:
        self._moved = self._clock()
        self._num_begun += 1

    def end(self) -> None:
        self._moved = self._clock()
        self._num_ended += 1

    def measure_stall(self) -> float:
        """Returns the seconds since something began or ended; 0 while there is no work."""
        return self._clock() - self._moved if self._num_begun > self._num_ended else 0.0


def answer_while_moving(
    link: ParentLink, progress: WorkProgress, timeout: float, what: str, alive: Callable[[], Alive] = Alive
) -> None:
    """Answer the parent's beats as long as no `what` takes longer than `timeout` seconds (0: any time); otherwise end.

    `alive` makes the answer; it is called in the lifeline's thread.
    """

    def on_beat() -> None:
        if timeout and progress.measure_stall() > timeout:
            link.fatal(f"{what} did not end in {timeout:g} s")
        link.report(alive())

    link.on_beat = on_beat
