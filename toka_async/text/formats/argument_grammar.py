"""Grammars of arguments where a call is no JSON object: each argument by its own schema, in the encoding of its format.

Arguments stand in the order of the schema. What a grammar accepts is an argument that the parser reads as a value of
the schema. A schema that is strict is refused where that cannot be so; otherwise the keyword is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toka_async.grammars.errors import GrammarError
from toka_async.grammars.lark import GUIDANCE, write_json, write_regex, write_text
from toka_async.grammars.patterns import translate
from toka_async.grammars.schema_types import CHOICES, TYPES, resolve, schema_types
from toka_async.text.formats.output_grammar import UnwritableError, find_shared
from toka_async.text.formats.typed_text import read_typed

NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "nullable"}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
OF_STRINGS = {"type", "pattern", "minLength", "maxLength", "format"}
OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
OF_ITEMS = {
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "uniqueItems",
}
MOST_KINDS = 64  # of one argument
MOST_NUMBERS = 1000  # that are listed
ANY = "(?s:.*)"
# In regular expressions: what looks around, refers back, or is a place within.
UNENFORCED = re.compile(r"\(\?(?!:)|\\[1-9bB]|(?<![\\\[])\^|(?<!\\)\$")
DATE, TIME = (
    "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?",
)
ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {
    "date": DATE,
    "time": f"{TIME}{ZONE}",
    "date-time": f"{DATE}T{TIME}{ZONE}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
# Texts that are read as values of other types, or might be.
_NUMBERS = "[\\s\\d+\\-._eE]+"
OTHERS = {
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "boolean": "\\s*(?i:true|false|0|1)\\s*",
    "null": "\\s*(null|None)\\s*",
    "object": f"\\s*\\{{{ANY}",
    "array": f"\\s*\\[{ANY}",
}


SCALARS = {
    "integer": "-?(0|[1-9][0-9]*)",
    "number": "-?(0|[1-9][0-9]*)(\\.[0-9]+)?",
    "boolean": "true|false",
    "null": "null",
}


@dataclass(frozen=True, slots=True)
class Argument:
    """schema: without references at its top."""

    name: str
    schema: Any
    is_required: bool


@dataclass(frozen=True, slots=True)
class Function:
    """A function's arguments. has_others: it names none and may have any. shared: what all of their schemas use."""

    arguments: list[Argument]
    has_others: bool
    shared: dict[str, Any]
    strict: bool

    def write_json(self, schema: Any) -> str:
        if isinstance(schema, dict):
            schema = schema | self.shared
        return write_json(schema, strict=self.strict)

    def check(self, kinds: Kinds) -> None:
        """Raises UnwritableError for a division that leaves out what has to be enforced."""
        if kinds.loss:
            self.refuse(f"{kinds.loss!r} of an argument cannot be enforced in the model's format")

    def refuse(self, what: str) -> None:
        """Raises UnwritableError where the function is strict."""
        if self.strict:
            raise UnwritableError(what)


def read_function(schema: Mapping[str, Any], strict: bool) -> Function:
    """Reads the schema of a function's arguments. Raises UnwritableError."""
    shared = find_shared(schema)
    schema = resolve(dict(schema), schema)
    if strict and (unknown := sorted(schema.keys() - OF_OBJECTS - NOTES - {GUIDANCE})):
        raise UnwritableError(f"{unknown[0]!r} cannot be enforced in the model's format")
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    needed = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
    root = {**schema, **shared}
    arguments = [
        Argument(name, _tidy(resolve(properties.get(name, {}), root), strict), name in needed)
        for name in dict.fromkeys([*properties, *needed])
    ]
    others = schema.get("additionalProperties", True)
    function = Function(arguments, not arguments and others is not False, shared, strict)
    if function.has_others and others not in (True, {}):
        function.refuse("'additionalProperties' with a schema cannot be enforced in the model's format")
    return function


def _tidy(schema: Any, strict: bool) -> Any:
    """Leaves out the values of a schema none of which is of its type, as of lists whose items were meant."""
    if strict or not isinstance(schema, dict) or not isinstance(schema.get("enum"), list) or _list_values(schema):
        return schema
    return {key: value for key, value in schema.items() if key != "enum"}


def _list_values(schema: Mapping[str, Any]) -> list[Any]:
    """Lists the values of a schema that are of its type."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    types = schema_types({"type": schema.get("type")})
    names = {*types, *(["integer"] if "number" in types else [])}
    return [each for each in values if not types or TYPES.get(type(each), "null") in names]


@dataclass(frozen=True, slots=True)
class Kinds:
    """What an argument may be: JSON types, `literal` or `any`, each with its schema or value.

    loss: the keyword that the division leaves out; empty: none.
    """

    found: list[tuple[str, Any]]
    loss: str

    @property
    def types(self) -> set[str]:
        return {kind if kind != "literal" else TYPES.get(type(value), "null") for kind, value in self.found}


def divide(schema: Any, function: Function) -> Kinds:
    """Divides an argument's schema into kinds of values. Raises UnwritableError."""
    found, losses = list[tuple[str, Any]](), list[str]()
    _divide(schema, function, 4, found, losses)
    if len(found) > MOST_KINDS:
        raise UnwritableError(f"an argument can be of at most {MOST_KINDS} kinds")
    return Kinds(found, losses[0] if losses else "")


def _divide(schema: Any, function: Function, depth: int, found: list[tuple[str, Any]], losses: list[str]) -> None:
    if schema is False:
        raise UnwritableError("no value matches the schema of an argument")
    if not isinstance(schema, dict) or depth == 0:
        found.append(("any", {}))
    elif "const" in schema or isinstance(schema.get("enum"), list):
        found += [("literal", value) for value in _list_values(schema)]
    elif name := next((each for each in CHOICES if isinstance(schema.get(each), list)), ""):
        choices = schema[name]
        types = [kind for choice in choices for kind in schema_types(choice)]
        is_exclusive = name == "anyOf" or len(set(types)) == len(types)
        if schema.keys() - NOTES - {name, "type", "discriminator"} or not is_exclusive:
            losses.append(name)
        for choice in choices:
            _divide(resolve(choice, function.shared), function, depth - 1, found, losses)
    else:
        found += [
            (kind, {**schema, "type": kind} if kind != "any" else schema) for kind in schema_types(schema) or ["any"]
        ]


@dataclass(slots=True)
class TextArguments:
    """Writes arguments that are text as it is, or else JSON; for one grammar.

    Args:
        unsafe: the regular expression of what no text may contain.
        end: what follows every value; no text may contain it.
    """

    unsafe: str
    end: str
    terminals: dict[str, str] = field(default_factory=dict)  # expression -> name

    def write(self, schema: Any, function: Function) -> str:
        """Writes a value and its end. Raises UnwritableError."""
        kinds, end = divide(schema, function), write_text(self.end)
        names = kinds.types
        literals = [value for kind, value in kinds.found if kind == "literal"]
        if not names & {"string", "any"} and all(_reads_back(json.dumps(each), each, schema) for each in literals):
            return f"{function.write_json(schema)} {end}"
        function.check(kinds)
        texts, documents = list[str](), list[str]()
        for kind, value in kinds.found:
            if kind == "literal":
                texts += self._spell(value, schema, function)
            elif kind in ("string", "any"):
                texts.append(" & ".join([self._safe, *list_limits(value, function, sorted(names & OTHERS.keys()))]))
            elif kind in SCALARS:
                texts.append(f"/{write_scalar(kind, value, function)}/")
            else:  # no text begins as these do
                documents.append(f"{function.write_json(value)} {end}")
        # One terminal: of several that may go on, the longest would be taken, even if it leads nowhere.
        written = [*([self._name(f"({' | '.join(texts)}) {end}")] if texts else []), *documents]
        if not written:
            raise UnwritableError("no value of an argument can be told in the model's format")
        return f"({' | '.join(written)})"

    def write_others(self, opening: str, key: str, between: str) -> str:
        """Writes any number of texts with any names: `opening`, a name of the regular expression `key`, `between`."""
        value = self._name(f"({self._safe}) {write_text(self.end)}")
        return f"({write_text(opening)} /{key}/ {write_text(between)} {value})*"

    def write_terminals(self) -> str:
        return "".join(f"{name}: {expression}\n" for expression, name in self.terminals.items())

    @property
    def _safe(self) -> str:
        return f"/{ANY}/ & ~/{ANY}({self.unsafe}){ANY}/"

    def _name(self, expression: str) -> str:
        return self.terminals.setdefault(expression, f"TOKA_VALUE_{len(self.terminals)}")

    def _spell(self, value: Any, schema: Any, function: Function) -> list[str]:
        """Writes the text that is read as the value, if there is one."""
        text = value if isinstance(value, str) else json.dumps(value)
        if self.end.strip() not in text and _reads_back(text, value, schema):
            return [write_text(text)]
        function.refuse(f"the value {text[:40]!r} cannot be told in the model's format")
        return []


def write_scalar(kind: str, schema: Mapping[str, Any], function: Function) -> str:
    """Writes the regular expression of a number, a flag or null, which may stand instead of a text."""
    limits = {key: schema[key] for key in sorted(schema.keys() - NOTES - OF_STRINGS - OF_ITEMS)}
    if kind in ("boolean", "null"):
        limits = {key: value for key, value in limits.items() if key not in OF_NUMBERS}
    match limits:
        case {"minimum": int(least), "maximum": int(most), **rest} if kind == "integer" and not rest:
            if 0 <= most - least <= MOST_NUMBERS:
                return "|".join(map(str, range(least, most + 1)))
    if limits:
        name = next(iter(limits))
        function.refuse(f"{name!r} of a value that may also be a text cannot be enforced in the model's format")
    return SCALARS[kind]


def list_limits(schema: Mapping[str, Any], function: Function, others: Iterable[str]) -> list[str]:
    """Lists what a text of a schema matches, as terminals; it must not be read as a value of the other types."""
    unknown = sorted(schema.keys() - NOTES - OF_STRINGS - OF_NUMBERS - OF_ITEMS)
    if unknown:
        function.refuse(f"{unknown[0]!r} of a text cannot be enforced in the model's format")
    limits = [f"~/{OTHERS[other]}/" for other in others]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        limits.append(f"/(?s:.){{{least},{most}}}/")
    if isinstance(pattern := schema.get("pattern"), str):
        searched = write_search(pattern)
        limits += [searched] if searched else []
        if not searched:
            function.refuse(f"the pattern {pattern!r} cannot be enforced in the model's format")
    if (name := schema.get("format")) in FORMATS:
        limits.append(f"/{FORMATS[name]}/")
    elif name is not None:
        function.refuse(f"the format {name!r} cannot be enforced in the model's format")
    return limits


def write_search(pattern: str) -> str:
    """Writes the texts in which a pattern is found; empty where it has what the library's expressions do not."""
    inner = pattern.removeprefix("^")
    is_end = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if is_end else inner
    before, after = "" if pattern.startswith("^") else ANY, "" if is_end else ANY
    if UNENFORCED.search(inner) or ("|" in inner and not (before and after)):
        return ""
    try:
        return write_regex(f"{before}({translate(inner)}){after}")
    except GrammarError:
        return ""


def _reads_back(text: str, value: Any, schema: Any) -> bool:
    read = read_typed(text, schema)
    return type(read) is type(value) and bool(read == value)
