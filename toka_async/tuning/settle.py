"""Settles a question by measuring once: later starts and the other ranks use the first rank's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from toka_async.model.comm import Comm, LocalComm
from toka_async.tuning.store import Facts, TuningCache

T = TypeVar("T")


class Choice(Protocol[T]):
    """A question that is answered by measuring on this chip."""

    @property
    def name(self) -> str:
        """The prefix of its files' names."""
        ...

    @property
    def kind(self) -> Any:
        """The type of an answer, which JSON can hold."""
        ...

    def describe(self) -> Facts:
        """Describes on what the answer depends, besides the chip and the libraries."""
        ...

    def admits(self, answer: T) -> bool:
        """Tells whether an answer from a file can be used here."""
        ...

    def measure(self) -> T: ...


class UsableChoice(Choice[T], Protocol[T]):
    """A question whose answer the same object puts into use."""

    def list_builds(self) -> Sequence[Callable[[], None]]:
        """Lists functions that each compile a kernel which measuring runs. They may run at the same time."""
        ...

    def use(self, answer: T) -> None: ...


def settle(choice: Choice[T], cache: TuningCache, comm: Comm | None = None) -> T:
    """Returns the answer that an earlier start kept; without one, measures it and keeps it.

    comm: the ranks that ask together. They wait for each other and get the first rank's answer; if it has none, all
    measure.
    """
    comm, facts = comm or LocalComm(), choice.describe()
    found: T | None = cache.find(choice.name, facts, choice.kind)
    if found is not None and not choice.admits(found):
        found = None
    answer = comm.agree(found, choice.kind | None)
    if answer is None:
        answer = comm.agree(choice.measure(), choice.kind)
        if comm.rank == 0:
            cache.keep(choice.name, facts, answer)
    return answer
