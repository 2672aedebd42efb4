"""Makes JSON schemas such that the library enforces them exactly, or names the keyword with which it would not.

Where a schema is lenient, such a keyword is left out. Otherwise the library would enforce another one, or fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from toka_async.grammars.errors import GrammarError
from toka_async.grammars.patterns import translate
from toka_async.grammars.schema_numbers import check_multiples, check_numbers, part_bounds
from toka_async.grammars.schema_parts import copy_schema, list_schemas

MOST_KNOWN = 1024  # sets of patterns
MOST_NAMES = 16  # patterns that are compared with each other while a request is read
DRAFTS = (
    *("https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema"),
    *(f"http://json-schema.org/draft-0{number}/schema" for number in (7, 6, 4)),
)


def make_exact(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Returns a schema for the library. Raises GrammarError where it is strict, which names the keyword."""
    copy: dict[str, Any] = copy_schema(schema)
    schemas = []
    for each in list_schemas(copy):
        check(each, strict)
        schemas.append(each)
    part_bounds(schemas)

    def refuse_factor(schema: dict[str, Any], why: str) -> None:
        if strict:
            raise GrammarError(f"multipleOf: {why}")
        del schema["multipleOf"]

    check_multiples(schemas, refuse_factor)
    return copy


def check(schema: dict[str, Any], strict: bool) -> None:
    """Rewrites one schema, without those within. Raises GrammarError where it is strict."""

    def refuse(keyword: str, why: str) -> None:
        if strict:
            raise GrammarError(f"{keyword}: {why}")
        del schema[keyword]

    check_numbers(schema, refuse)
    if isinstance(pattern := schema.get("pattern"), str):
        try:
            schema["pattern"] = translate(pattern)
        except GrammarError as error:
            refuse("pattern", str(error))
    if isinstance(named := schema.get("patternProperties"), dict):
        try:
            schema["patternProperties"] = translate_names(named, strict=strict)
        except GrammarError as error:
            refuse("patternProperties", str(error))
            schema.pop("additionalProperties", None)  # it is about what they do not match
    if not isinstance(schema.get("items"), list):
        # It means nothing then, but the library takes it for the sign of an older draft, which has no `prefixItems`.
        schema.pop("additionalItems", None)
    if isinstance(draft := schema.get("$schema"), str) and draft.rstrip("#") not in DRAFTS:
        refuse("$schema", f"it must be one of {', '.join(DRAFTS)}")


def translate_names(named: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Translates the patterns of names. Raises GrammarError, also where two match one name and the schema is lenient.

    If it is strict, the library says so itself: it may take long to find out. Of many patterns nobody asks it here.
    """
    translated = {translate(pattern): schema for pattern, schema in named.items()}
    if len(translated) < len(named):
        raise GrammarError("a name may match several patterns")
    if len(named) > 1 and not strict and (len(named) > MOST_NAMES or have_common(tuple(translated))):
        raise GrammarError("a name may match several patterns")
    return translated


@lru_cache(MOST_KNOWN)
def have_common(patterns: tuple[str, ...]) -> bool:
    """Whether a name may match several patterns, as far as the library can tell."""
    from llguidance import LLMatcher

    schema = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
    return bool(LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}"))
