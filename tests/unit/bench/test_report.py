from __future__ import annotations

from toka_async.bench.report import format_line, format_number, format_table, format_value


def test_figures_have_the_digits_that_tell_something() -> None:
    assert [format_number(value) for value in (3, 1234567, 1234.56, 12.345, 0.00123)] == [
        "3",
        "1,234,567",
        "1,235",
        "12.3",
        "0.00123",
    ]


def test_values_as_people_read_them() -> None:
    assert format_value({"p50": 1.25, "max": None}) == "p50 1.25, max -"
    assert format_value([1000.0, 2]) == "1,000, 2"
    assert format_value([]) == "-"
    assert format_value(True) == "yes"
    assert format_value("text") == "text"
    assert format_line("steps", 12000).split() == ["steps", "12,000"]


def test_rows_of_figures() -> None:
    assert format_table(("p50", "max"), []) == []
    head, row = format_table(("p50", "max"), [("latency", (0.5, 12.0))])
    assert head.split() == ["p50", "max"]
    assert row.split() == ["latency", "0.5", "12"]
    assert len(head) == len(row)
