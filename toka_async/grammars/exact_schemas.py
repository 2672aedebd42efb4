"""Makes JSON schemas such that the library enforces them exactly, or names the keyword with which it would not.

Where a schema is lenient, such a keyword is left out. Otherwise the library would enforce another one, or fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toka_async.grammars.errors import GrammarError
from toka_async.grammars.schema_numbers import check_numbers, part_bounds
from toka_async.grammars.schema_parts import list_schemas


def make_exact(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Returns a schema for the library. Raises GrammarError where it is strict, which names the keyword."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(schema))
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    schemas = []
    for each in list_schemas(copy):
        check(each, strict)
        schemas.append(each)
    part_bounds(schemas)
    return copy


def check(schema: dict[str, Any], strict: bool) -> None:
    """Rewrites one schema, without those within. Raises GrammarError where it is strict."""

    def refuse(keyword: str, why: str) -> None:
        if strict:
            raise GrammarError(f"{keyword}: {why}")
        del schema[keyword]

    check_numbers(schema, refuse)
