"""Actions that the ranks carry out, one after the other, while no step is queued on them. Knows no steps.

Loads of tensors are sent ahead, so that ranks have the next one when they are done with one.
"""

from __future__ import annotations

from collections import deque

from toka_async.control import Control, ControlDone, LoadTensors


class RankOrders:
    """num_ranks: of the replica; each answers every order."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._waiting: deque[Control] = deque()
        self._sent: deque[tuple[Control, list[ControlDone]]] = deque()  # with the answers

    @property
    def is_busy(self) -> bool:
        """An order waits, or is carried out."""
        return bool(self._waiting or self._sent)

    def add(self, order: Control) -> None:
        self._waiting.append(order)

    def take(self) -> Control | None:
        """Take an order that is to be sent now; None while another one is carried out, unless both load tensors."""
        if not self._waiting:
            return None
        if self._sent and not (_loads(self._sent[-1][0]) and _loads(self._waiting[0])):
            return None
        order = self._waiting.popleft()
        self._sent.append((order, []))
        return order

    def complete(self, done: ControlDone) -> ControlDone | None:
        """Take a rank's answer; returns that of all ranks when it was the last one."""
        answers = next(answers for order, answers in self._sent if order.number == done.number)
        answers.append(done)
        if len(answers) < self._num_ranks:
            return None
        first, _ = self._sent.popleft()
        assert first.number == done.number, "ranks answer in order"
        return ControlDone(
            number=done.number,
            error="; ".join(dict.fromkeys(answer.error for answer in answers if answer.error)),
            count=max(answer.count for answer in answers),
            sums=tuple(each for answer in answers for each in answer.sums),
            rows=tuple(each for answer in answers for each in answer.rows),
        )


def _loads(order: Control) -> bool:
    return isinstance(order.action, LoadTensors)
