"""Who comes next, of several owners."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from toka_async.fair_queue import FairQueue


def taken(queue: FairQueue[str]) -> list[str]:
    items = []
    while queue:
        items.append(queue.take())
    return items


def test_owners_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for owner, item in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]:
        queue.put(owner, item)
    assert taken(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_comes_back_is_behind_those_that_wait() -> None:
    queue: FairQueue[str] = FairQueue()
    for owner in "ab":
        queue.put(owner, owner)
    assert queue.take() == "a"
    queue.put("a", "a again")
    assert taken(queue) == ["b", "a again"]


@given(st.lists(st.one_of(st.none(), st.sampled_from("abcd")), max_size=60))
def test_nobody_waits_for_more_than_one_of_each_other_owner(steps: list[str | None]) -> None:
    """None takes; a name puts. In order within an owner, and nothing is lost."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    waiting: dict[str, deque[int]] = {}
    overtaken: dict[str, Counter[str]] = {}  # since an owner's turn came last, or it came
    for number, owner in enumerate(steps):
        if owner is not None:
            queue.put(owner, (owner, number))
            overtaken.setdefault(owner, Counter())
            waiting.setdefault(owner, deque()).append(number)
        elif queue:
            name, item = queue.take()
            assert waiting[name].popleft() == item
            del overtaken[name]
            for others in overtaken.values():
                others[name] += 1
                assert others[name] == 1
            if waiting[name]:
                overtaken[name] = Counter()
    assert bool(queue) == any(waiting.values())
