"""Which numbers of a JSON schema the library enforces, and bounds written so that it does.

It reads numbers as floats of 64 bits. Bounds of integers then become integers of as many bits. Bounds of other numbers
are written out: shortest digits and zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeGuard

Refuse = Callable[[str, str], None]  # keyword, why

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
NUMERIC = frozenset((*LOWER, *UPPER, "const", "enum"))
EXACT = 1 << 53  # integers below it are exact as floats
LEAST, MOST = -(1 << 63), (1 << 63) - 1
LOWEST = -((1 << 63) - 1024)  # the least float that the library can negate as an integer
FAR = 10**18  # from here on the library cannot write bounds that are open at the other side, nor those of floats
MOST_FACTOR, MOST_DIGITS = (1 << 32) - 1, 9
JOINING = frozenset(("allOf", "anyOf", "oneOf", "$ref"))  # keywords with which schemas come together
NEAR_ZERO = 1e-30  # each digit nests its regular expression deeper, of which there is a limit


def check_numbers(schema: dict[str, Any], refuse: Refuse) -> None:
    """Refuses bounds and constants that would be other ones. Tighter ones allow nothing that the schema forbids.

    A constant of the least integer would make the library call itself without end, which ends the process.
    """
    if not NUMERIC & schema.keys():
        return
    for name, exclusive in (LOWER, UPPER):
        if isinstance(is_exclusive := schema.get(exclusive), bool):  # as draft 4 has it
            del schema[exclusive]
            if is_exclusive and name in schema:
                schema[exclusive] = schema.pop(name)
    is_integer = isinstance(types := schema.get("type"), str | list) and "number" not in types
    for name in (*LOWER, *UPPER):
        if _is_number(value := schema.get(name)):
            if is_integer and name in LOWER and value < LOWEST:
                schema[name] = LOWEST
            elif not _is_bound_kept(name, value, is_integer):
                refuse(name, f"{_shorten(value)} is too far from 0 for an exact bound")
    for name in ("const", "enum"):
        if name in schema and (others := [each for each in list_numbers(schema[name]) if not _is_kept(each)]):
            refuse(name, f"{_shorten(others[0])} would be another number")


def part_bounds(schemas: Sequence[dict[str, Any]]) -> None:
    """Replaces exclusive bounds at a whole number that have another bound less than 1 away: the library allows them.

    The next float is inclusive instead; next to 0, one so small that nobody means it. Bounds of different schemas may
    come together by a reference or a choice, so all are compared.
    """
    lower = [schema[name] for schema in schemas for name in LOWER if _is_number(schema.get(name))]
    upper = [schema[name] for schema in schemas for name in UPPER if _is_number(schema.get(name))]
    below_upper = {math.floor(each) for each in upper if abs(each) < EXACT and each != math.floor(each)}
    above_lower = {math.ceil(each) for each in lower if abs(each) < EXACT and each != math.ceil(each)}
    for schema in schemas:
        limit = schema.get("exclusiveMinimum")
        if _is_number(limit) and limit >= 0 and limit in below_upper:
            del schema["exclusiveMinimum"]
            least = math.nextafter(limit, math.inf) if limit else NEAR_ZERO
            schema["minimum"] = max(least, other) if _is_number(other := schema.get("minimum")) else least
        limit = schema.get("exclusiveMaximum")
        if _is_number(limit) and limit <= 0 and limit in above_lower:
            del schema["exclusiveMaximum"]
            most = math.nextafter(limit, -math.inf) if limit else -NEAR_ZERO
            schema["maximum"] = min(most, other) if _is_number(other := schema.get("maximum")) else most


def check_multiples(schemas: Sequence[dict[str, Any]], refuse: Callable[[dict[str, Any], str], None]) -> None:
    """Refuses factors of too many digits, and those that may come together as one of too many.

    The library computes with 32 bits, and does not see that they overflow.
    """
    factors = dict[int, Decimal]()
    for index, schema in enumerate(schemas):
        if _is_number(value := schema.get("multipleOf")) and value:
            factor = abs(Decimal(repr(value)))
            digits = factor.normalize().as_tuple()
            scale = -digits.exponent if isinstance(digits.exponent, int) else MOST_DIGITS
            if scale > MOST_DIGITS or factor.scaleb(max(scale, 0)) > MOST_FACTOR:
                refuse(schema, f"{_shorten(value)} has too many digits")
            else:
                factors[index] = factor
    different = set(factors.values())
    scale = max((-int(each.normalize().as_tuple().exponent) for each in different), default=0)
    product = math.prod(int(each.scaleb(max(scale, 0))) for each in different)
    if len(different) > 1 and product > MOST_FACTOR and any(JOINING & schema.keys() for schema in schemas):
        for index in factors:
            refuse(schemas[index], "the least common multiple of several may have too many digits")


def _is_bound_kept(name: str, value: float, is_integer: bool) -> bool:
    """Whether the library's bound allows nothing that this one forbids, and the library can write it."""
    if abs(value) < EXACT:
        return True
    is_lower = name in LOWER
    try:
        read = float(value)
        used = int(read + (name.startswith("exclusive") if is_lower else -name.startswith("exclusive")))
    except (OverflowError, ValueError):  # infinity and what is no number
        return False
    used = max(LEAST, min(used, MOST))
    exact = int(value) + (1 if is_lower else -1) * name.startswith("exclusive")
    if (used < exact or used >= FAR) if is_lower else (used > exact or used <= -FAR):
        return False
    written = int(Decimal(repr(read)))
    return is_integer or (abs(value) < FAR and (written >= value if is_lower else written <= value))


def _is_kept(value: float) -> bool:
    """Whether the library keeps a constant."""
    if abs(value) < EXACT:
        return True
    return LOWEST <= value <= MOST and min(int(float(value)), MOST) == value


def list_numbers(value: Any) -> list[float]:
    """Lists the numbers within a value of JSON."""
    if isinstance(value, dict | list):
        return [
            each for inner in (value.values() if isinstance(value, dict) else value) for each in list_numbers(inner)
        ]
    return [value] if _is_number(value) else []


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shorten(value: Any) -> str:
    return str(value) if isinstance(value, float) or abs(value) < 10**40 else "a number of more than 40 digits"
