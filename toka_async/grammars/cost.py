"""Tells from a grammar's text whether compiling it may take seconds and gigabytes.

llguidance limits how many states it makes while it reads lexemes, but not two kinds of work before that: it looks for a
text that matches all expressions of an intersection, and it makes a state for each remainder of a division. Either can
be exponential in the length of the grammar. Patterns of names are intersected with each other, so many of them take
long, too. What this module does not know is taken for cheap.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

MOST_CHARACTERS = 1 << 16
MOST_EXPRESSIONS = 6  # which one string may have to match at once: with 13 the library takes seconds, with 16 minutes
MOST_REMAINDERS = 1000  # of a division: 100,000 take 0.7 s
# In Lark, and names in JSON; anywhere else these cost a little time and nothing else.
_INTERSECTION = re.compile(r'[&~]|"patternProperties"')
_MERGED = re.compile(r'"(allOf|\$ref|\$dynamicRef|anyOf|oneOf)"\s*:')
_EXPRESSION = re.compile(r'"(pattern|format)"\s*:')
_DIVISOR = re.compile(r'"multipleOf"\s*:\s*([^\s,}\]]+)')


def is_costly(grammar: str) -> bool:
    """Tells whether a grammar, as `lark.make_grammar` makes it, has to be compiled under limits first."""
    if len(grammar) > MOST_CHARACTERS or _INTERSECTION.search(grammar):
        return True
    if len(_EXPRESSION.findall(grammar)) > MOST_EXPRESSIONS and _MERGED.search(grammar):
        return True
    divisors = _DIVISOR.findall(grammar)
    remainders = 1
    for divisor in divisors:  # a number may have to be a multiple of all
        remainders *= count_remainders(divisor)
    return remainders > MOST_REMAINDERS


def count_remainders(divisor: str) -> int:
    """Counts the remainders by a number: by its digits, without zeros at the end."""
    try:
        _, digits, _ = Decimal(divisor).normalize().as_tuple()
    except InvalidOperation:
        return 1  # the schema is refused
    return int("".join(map(str, digits)))
