"""Formats the figures of a benchmark for people: a name and a value per line, percentiles side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

WIDTH = 26


def format_number(value: float) -> str:
    """Formats a number with separated thousands and its significant digits."""
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_line(name: str, value: object) -> str:
    """Formats one name and its value; a mapping or a sequence stays on the line."""
    return f"{name:{WIDTH}} {format_value(value)}"


def format_value(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return format_number(value)
        case Mapping():
            return ", ".join(f"{name} {format_value(each)}" for name, each in value.items())
        case str():
            return value
        case Sequence():
            return ", ".join(map(format_value, value)) or "-"
    return str(value)


def format_table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]]) -> list[str]:
    """Formats named rows of figures below their heads; returns no lines without rows."""
    lines = [f"{name:{WIDTH}} " + " ".join(f"{format_number(value):>10}" for value in values) for name, values in rows]
    return [f"{'':{WIDTH}} " + " ".join(f"{each:>10}" for each in head), *lines] if lines else []
