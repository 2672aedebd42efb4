from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from toka_async.batches.line_ranges import Gap, LineRanges


def ends(total: int) -> list[int]:
    """Where each line of a made-up file ends: line i has i + 1 bytes."""
    return [(line + 1) * (line + 2) // 2 for line in range(total)]


def left(spans: LineRanges, total: int) -> list[int]:
    return [line for gap in spans.gaps(total) for line in range(gap.first, gap.stop)]


@given(st.permutations(range(12)), st.integers(0, 12))
def test_every_order_leaves_what_is_not_done(order: list[int], num_done: int) -> None:
    spans, places = LineRanges(), ends(12)
    for line in order[:num_done]:
        spans.add(line, places[line])
    assert left(spans, 12) == sorted(order[num_done:])
    for gap in spans.gaps(12):
        assert gap.offset == (places[gap.first - 1] if gap.first else 0)
    assert spans.num_done == num_done
    assert LineRanges.decode(spans.encode()) == spans


def test_neighbours_are_one_range() -> None:
    spans = LineRanges()
    for line in (0, 2, 4, 1, 3):
        spans.add(line, 10 * line + 10)
    assert spans == LineRanges([0], [5], [50])
    assert list(spans.gaps(8)) == [Gap(5, 8, 50)]
    assert not list(spans.gaps(5))


def test_a_straggler_costs_one_range() -> None:
    spans = LineRanges()
    for line in range(1, 1000):
        spans.add(line, line)
    assert len(spans.encode()) == 24
