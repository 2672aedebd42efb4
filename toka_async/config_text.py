"""The types and values of configuration fields as people read them. Knows msgspec's types, and no field."""

from __future__ import annotations

from msgspec import inspect


def type_text(kind: object) -> str:
    """Which values a field takes."""
    return _info_text(inspect.type_info(kind))


def _info_text(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata():
            return _info_text(info.type)
        case inspect.UnionType():
            return " or ".join(_info_text(part) for part in reversed(info.types))
        case inspect.LiteralType():
            return " or ".join(str(value) for value in info.values)
        case inspect.IntType() | inspect.FloatType():
            return ("integer" if isinstance(info, inspect.IntType) else "number") + _bounds_text(info)
        case inspect.BoolType():
            return "true or false"
        case _:
            return "text"


def _bounds_text(info: inspect.IntType | inspect.FloatType) -> str:
    low = f"above {info.gt}" if info.gt is not None else f"from {info.ge}" if info.ge is not None else ""
    high = f"to {info.le}" if info.le is not None and info.le != 2**31 - 1 else ""
    return "".join(f" {part}" for part in (low, high) if part)


def choices(kind: object) -> list[str]:
    """The words that a field takes, if it takes words."""
    info = inspect.type_info(kind)
    info = info.type if isinstance(info, inspect.Metadata) else info
    return [str(value) for value in info.values] if isinstance(info, inspect.LiteralType) else []


def meaning(kind: object) -> str:
    """Its description."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.Metadata), f"{kind} has no description"
    return str((info.extra_json_schema or {}).get("description", ""))


def value_text(value: object) -> str:
    """As it is written in TOML, but for quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)
