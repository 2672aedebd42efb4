from __future__ import annotations

from toka_async.bench.report import figure, line, shown, table


def test_figures_have_the_digits_that_tell_something() -> None:
    assert [figure(value) for value in (3, 1234567, 1234.56, 12.345, 0.00123)] == [
        "3",
        "1,234,567",
        "1,235",
        "12.3",
        "0.00123",
    ]


def test_values_as_people_read_them() -> None:
    assert shown({"p50": 1.25, "max": None}) == "p50 1.25, max -"
    assert shown([1000.0, 2]) == "1,000, 2"
    assert shown([]) == "-"
    assert shown(True) == "yes"
    assert shown("text") == "text"
    assert line("steps", 12000).split() == ["steps", "12,000"]


def test_rows_of_figures() -> None:
    assert table(("p50", "max"), []) == []
    head, row = table(("p50", "max"), [("latency", (0.5, 12.0))])
    assert head.split() == ["p50", "max"]
    assert row.split() == ["latency", "0.5", "12"]
    assert len(head) == len(row)
