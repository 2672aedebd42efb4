"""Actions that the ranks carry out, one after the other, while no step is queued on them. Knows no steps."""

from __future__ import annotations

from collections import deque

from toka_async.control import Control, ControlDone


class RankOrders:
    """num_ranks: of the replica; each answers every order."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._waiting: deque[Control] = deque()
        self._sent: Control | None = None
        self._answers: list[ControlDone] = []

    @property
    def is_busy(self) -> bool:
        """An order waits, or is carried out."""
        return bool(self._waiting) or self._sent is not None

    def add(self, order: Control) -> None:
        self._waiting.append(order)

    def take(self) -> Control | None:
        """Take the order that is to be sent now; None while one is carried out."""
        if self._sent is not None or not self._waiting:
            return None
        self._sent = self._waiting.popleft()
        return self._sent

    def complete(self, done: ControlDone) -> ControlDone | None:
        """Take a rank's answer; returns that of all ranks when it was the last one."""
        assert self._sent is not None
        assert self._sent.number == done.number, "ranks answer in order"
        self._answers.append(done)
        if len(self._answers) < self._num_ranks:
            return None
        answers, self._answers, self._sent = self._answers, [], None
        return ControlDone(
            number=done.number,
            error="; ".join(dict.fromkeys(answer.error for answer in answers if answer.error)),
            count=max(answer.count for answer in answers),
            sums=tuple(each for answer in answers for each in answer.sums),
        )
