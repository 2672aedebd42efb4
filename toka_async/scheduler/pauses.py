"""Whether steps may be built, and which pauses are yet to be answered. Knows no requests."""

from __future__ import annotations

from toka_async.control import ControlDone, PauseMode


class PauseState:
    """mode: of the pause; None: there is none. is_updating: an update of the weights is open."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.is_updating = False
        self._asked: list[int] = []  # numbers of pauses that are not complete

    @property
    def holds_steps(self) -> bool:
        """No step may be built. A pause that waits for requests to end needs steps."""
        return self.is_updating or (self.mode is not None and self.mode != "wait")

    @property
    def is_awaited(self) -> bool:
        """Somebody waits until the pause is complete."""
        return bool(self._asked)

    def pause(self, number: int, mode: PauseMode) -> None:
        self.mode = mode
        self._asked.append(number)

    def end_update(self, failed: bool) -> None:
        """The open update is over; after a failed one nothing is computed, also in a pause that waits."""
        self.is_updating = False
        if failed and not self.holds_steps:
            self.mode = "keep"

    def resume(self) -> list[ControlDone]:
        """End the pause; returns the answers to those who waited for it."""
        self.mode = None
        return self._answer("the engine was resumed before the pause was complete")

    def complete(self) -> list[ControlDone]:
        """Note that nothing is computed any more; returns the answers to those who waited for that."""
        return self._answer("")

    def _answer(self, error: str) -> list[ControlDone]:
        asked, self._asked = self._asked, []
        return [ControlDone(number=number, error=error) for number in asked]
