"""Tells from a grammar's text whether compiling it may take seconds and gigabytes.

llguidance limits how many states it makes while it reads lexemes, but not two kinds of work before that: it looks for a
text that matches all expressions of an intersection, and it makes a state for each remainder of a division. Either can
be exponential in the length of the grammar. Patterns of names are intersected with each other, so many of them take
long, too. What this module does not know is taken for cheap.
"""

from __future__ import annotations

import math
import re

MOST_CHARACTERS = 1 << 16
# MEASUREMENTS.md has what more of these take.
MOST_EXPRESSIONS = 6  # that one string may have to match at once
MOST_REMAINDERS = 1000  # of a division
# In Lark, and names in JSON; anywhere else these cost a little time and nothing else.
_INTERSECTION = re.compile(r'[&~]|"patternProperties"')
_MERGED = re.compile(r'"(allOf|\$ref|\$dynamicRef|anyOf|oneOf)"\s*:')
_EXPRESSION = re.compile(r'"(pattern|format)"\s*:')
_DIVISOR = re.compile(r'"multipleOf"\s*:\s*([^\s,}\]]+)')
_NO_DIGITS = re.compile(r"[eE].*|[^0-9]")
_MOST_DIGITS = 10  # the library refuses divisors of as many


def is_costly(grammar: str) -> bool:
    """Tells whether a grammar, as `lark.make_grammar` makes it, has to be compiled under limits first."""
    if len(grammar) > MOST_CHARACTERS or _INTERSECTION.search(grammar):
        return True
    if len(_EXPRESSION.findall(grammar)) > MOST_EXPRESSIONS and _MERGED.search(grammar):
        return True
    # A number may have to be a multiple of all.
    return math.prod(map(count_remainders, _DIVISOR.findall(grammar))) > MOST_REMAINDERS


def count_remainders(divisor: str) -> int:
    """Counts the remainders by a number, whatever its place of the decimal point: at most those of its first digits."""
    digits = _NO_DIGITS.sub("", divisor).strip("0")
    return int(digits[:_MOST_DIGITS] or 1)
