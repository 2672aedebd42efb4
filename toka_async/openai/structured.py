"""Makes the grammar of whole outputs from the fields that say what outputs must look like.

OpenAI's `response_format` is lenient unless it is `strict`, as OpenAI's is. The fields of vLLM and SGLang are exact.
Knows the fields; knows no tokenizer, so a server compiles a grammar before it takes the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toka_async.grammars.errors import GrammarError
from toka_async.grammars.lark import make_grammar, read_grammar, write_choice, write_json, write_regex
from toka_async.grammars.schema_parts import copy_schema, list_schemas
from toka_async.grammars.vocabulary import EXTRA, is_installed
from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.requests import GenerationFields, OutputFormat, StructuredOutputs
from toka_async.openai.structural_tags import write_structural_tag

MAX_GRAMMAR = 1 << 19  # characters
# Fields of `response_format`, and the type that has them.
FIELD_TYPES = {"json_schema": "json_schema"} | dict.fromkeys(("format", "structures", "triggers"), "structural_tag")
# Fields of `structured_outputs` that change how JSON is written, and the kinds that they change.
JSON_OPTIONS = {
    "whitespace_pattern": ("json", "json_object"),
    "disable_any_whitespace": ("json", "json_object"),
    "disable_additional_properties": ("json",),
}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """text: of the whole output, in llguidance's Lark; empty: any output. param: the field that it is made of."""

    text: str = ""
    param: str = ""


NO_GRAMMAR = OutputGrammar()
NO_SPACING: Mapping[str, Any] = {}
NO_TOKENS: Mapping[str, int] = {}


def find_grammar(
    fields: GenerationFields, special_tokens: Mapping[str, int] = NO_TOKENS, end_ids: Sequence[int] = ()
) -> OutputGrammar:
    """Finds what the outputs of a request must look like.

    special_tokens: text -> id; with the ids of end tokens, for structural tags.

    Raises ApiError: 400, which names the field; 501 without the library.
    """
    wanted: dict[str, Any] = {}
    if fields.response_format is not None:
        check_type(fields.response_format)
        if fields.response_format.type != "text":
            wanted["response_format"] = fields.response_format
    names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    for name in (*names, "json_schema", "regex", "ebnf", "structural_tag"):
        if getattr(fields, name) is not None:
            wanted[name] = getattr(fields, name)
    if fields.guided_whitespace_pattern is not None and not wanted.keys() & {"guided_json", "json_schema"}:
        name = "guided_whitespace_pattern"
        raise bad_request(f"'{name}' needs guided_json or json_schema, whose blanks it says", param=name)
    if not wanted:
        return NO_GRAMMAR
    param, *others = wanted
    if others:
        raise bad_request(f"'{param}' and '{others[0]}' both say what outputs must look like; give one", param=param)
    check_installed(param)
    if (tag := find_tag(param, wanted[param])) is not None:
        text = write_structural_tag(*tag, special_tokens, end_ids)
    else:
        text = write_wish(fields, param, wanted[param])
    return make_output_grammar(text, param, fields)


def find_tag(param: str, wish: Any) -> tuple[Any, str] | None:
    """Finds the structural tag that a field asks for, and its place in the request. Raises ApiError (400)."""
    if isinstance(wish, OutputFormat) and wish.type == "structural_tag":
        fields = {name: getattr(wish, name) for name in ("format", "structures", "triggers")}
        return {name: value for name, value in fields.items() if value is not None}, param
    if isinstance(wish, StructuredOutputs) and wish.structural_tag is not None:
        name, _ = choose_kind(wish)
        return wish.structural_tag, f"{param}.{name}"
    return (wish, param) if param == "structural_tag" else None


def make_output_grammar(text: str, param: str, fields: GenerationFields) -> OutputGrammar:
    """Makes the grammar of a request's outputs from its text. Raises ApiError (400) that names the field."""
    if fields.ignore_eos:
        raise bad_request(f"'ignore_eos' and '{param}': a complete output could not end", param="ignore_eos")
    if fields.allowed_token_ids is not None:
        name = "allowed_token_ids"
        raise bad_request(f"'{name}' and '{param}': no token may be left that both allow; give one", param=name)
    if len(text) > MAX_GRAMMAR:
        raise bad_request(f"'{param}' makes a grammar of more than {MAX_GRAMMAR} characters", param=param)
    return OutputGrammar(text, param)


def write_wish(fields: GenerationFields, param: str, wish: Any) -> str:
    """Writes the grammar that one field asks for. Raises ApiError."""
    spacing: dict[str, Any] = {}
    if fields.guided_whitespace_pattern is not None:
        spacing["whitespace_pattern"] = fields.guided_whitespace_pattern
    match param:
        case "response_format":
            return write_response_format(wish)
        case "structured_outputs":
            return write_structured_outputs(wish)
        case "guided_json" | "json_schema":
            return write_schema(wish, param, spacing)
        case "guided_regex" | "regex":
            return write_own_regex(wish, param)
        case "guided_choice":
            return make_grammar(write_choice(wish))
        case _:
            return read_own_grammar(wish, param)


def check_type(wish: OutputFormat) -> None:
    """Raises ApiError (400) for a field that the format's type does not have."""
    for name, owner in FIELD_TYPES.items():
        if wish.type != owner and getattr(wish, name) is not None:
            param = f"response_format.{name}"
            raise bad_request(f"'{param}' needs the type '{owner}', got '{wish.type}'", param=param)


def write_response_format(wish: OutputFormat) -> str:
    if wish.type == "json_object":
        return make_grammar(write_json(ANY_OBJECT, strict=True))
    param = "response_format.json_schema"
    if wish.json_schema is None:
        raise bad_request(f"'{param}' is missing", param=param)
    param = f"{param}.schema"
    if wish.json_schema.strict and wish.json_schema.wanted is True:  # which is what an absent one means
        raise bad_request(f"'{param}' is missing: with 'strict' the answer must have a schema", param=param)
    return write_schema(wish.json_schema.wanted, param, strict=wish.json_schema.strict)


def write_structured_outputs(wish: StructuredOutputs) -> str:
    where = "structured_outputs"
    name, value = choose_kind(wish)
    spacing: dict[str, Any] = {}
    if wish.whitespace_pattern is not None:
        spacing["whitespace_pattern"] = wish.whitespace_pattern
    if wish.disable_any_whitespace:
        spacing = {"whitespace_flexible": False}
    match name:
        case "json":
            is_closed = wish.disable_additional_properties
            return write_schema(value, f"{where}.json", spacing, is_closed=is_closed)
        case "json_object":
            return make_grammar(write_json(ANY_OBJECT, strict=True, options=spacing))
        case "regex":
            return write_own_regex(value, f"{where}.regex")
        case "choice":
            return make_grammar(write_choice(value))
        case _:
            return read_own_grammar(value, f"{where}.grammar")


def choose_kind(wish: StructuredOutputs) -> tuple[str, Any]:
    """The one kind that is given, and its value. Raises ApiError (400), also for options that it does not have."""
    where, names = "structured_outputs", ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = {name: value for name in names if (value := getattr(wish, name)) is not None and value is not False}
    if len(given) != 1:
        raise bad_request(f"'{where}' must have exactly one of {', '.join(names)}", param=where)
    kind, wanted = next(iter(given.items()))
    for option, kinds in JSON_OPTIONS.items():
        if getattr(wish, option) and kind not in kinds:
            param = f"{where}.{option}"
            raise bad_request(f"'{param}' needs {' or '.join(kinds)}, got {kind}", param=param)
    if wish.whitespace_pattern is not None and wish.disable_any_whitespace:
        param = f"{where}.whitespace_pattern"
        raise bad_request(f"'{param}' and disable_any_whitespace both say which blanks are allowed", param=param)
    return kind, wanted


def write_schema(
    wish: Any, param: str, spacing: Mapping[str, Any] = NO_SPACING, *, strict: bool = True, is_closed: bool = False
) -> str:
    """Writes the grammar of a schema's documents. Raises ApiError (400), which names the keyword if that is wrong."""
    schema = read_schema(wish, param)
    try:
        if is_closed:
            schema = close_objects(schema)
        return make_grammar(write_json(schema, strict=strict, options=spacing))
    except GrammarError as error:
        message = f"'{param}' cannot be enforced: {error}"
        raise bad_request(message, param=param, code="invalid_grammar") from None


def read_schema(wish: Any, param: str) -> Mapping[str, Any] | bool:
    """Reads a schema that is an object, a bool, or a text of JSON. Raises ApiError (400)."""
    if isinstance(wish, str):
        try:
            wish = json.loads(wish)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"'{param}' is not JSON: {error}", param=param) from None
    if not isinstance(wish, dict | bool):
        raise bad_request(f"'{param}' must be a JSON schema: an object", param=param)
    return wish


def write_own_regex(pattern: str, param: str) -> str:
    try:
        return make_grammar(write_regex(pattern))
    except GrammarError as error:
        raise bad_request(f"'{param}': {error}", param=param) from None


def read_own_grammar(wish: str, param: str) -> str:
    try:
        return read_grammar(wish)
    except GrammarError as error:
        raise bad_request(f"'{param}' is {error}", param=param) from None


def close_objects(schema: Any) -> Any:
    """Forbids properties that objects with named properties do not name, wherever the schema leaves that open.

    Raises GrammarError.
    """
    closed = copy_schema(schema)
    for each in list_schemas(closed):
        if each.keys() & {"properties", "patternProperties"}:
            each.setdefault("additionalProperties", False)
    return closed


def check_installed(param: str) -> None:
    """Raises ApiError (501) without the library."""
    if not is_installed():
        raise ApiError(501, f"'{param}': {EXTRA}", param=param, code="extra_not_installed")
