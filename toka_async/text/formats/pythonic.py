"""The pythonic format of Llama 3.2 and Llama 4: the whole answer is a list of calls, `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping
from typing import Any

from toka_async.grammars.lark import write_text
from toka_async.text.formats.argument_grammar import Function, divide, read_function
from toka_async.text.formats.format import Format
from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, UnwritableError, write_leading_calls

START, END = "<|python_start|>", "<|python_end|>"
MAX_CHARS = 1 << 20  # of a list that is read
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")  # characters that Python knows after a backslash
# Strings, and arguments whose names are Python's keywords, which a call cannot have.
KEYWORD = re.compile(rf"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\b({"|".join(keyword.kwlist)})(?=\s*=[^=])""", re.DOTALL)
RENAMED = "__keyword"
INFINITE = (float("inf"),)  # `1e999`
WORDS = {"boolean": ("True", "False"), "null": ("None",)}
NAMES = {"true": True, "false": False, "null": None}


def read_list(raw: str) -> list[tuple[str, Any]]:
    """Raises ValueError for anything but a list of calls with named arguments that are literals."""
    text = raw.strip().removeprefix(START).removesuffix(END).strip()
    if len(text) > MAX_CHARS:
        raise ValueError("the list is too long")
    text = ESCAPE.sub(lambda found: found[0] if found[1] in ESCAPES else "\\" + found[0], text)  # as Python reads them
    text = KEYWORD.sub(lambda found: found[0] if found[1] is None else found[1] + RENAMED, text)
    try:
        parsed = ast.parse(text, mode="eval").body
        if not isinstance(parsed, ast.List):
            raise ValueError("no list of calls")
        return [_read_call(each) for each in parsed.elts]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _read_call(node: ast.expr) -> tuple[str, Any]:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("a call has named arguments")
    return ast.unparse(node.func), {
        str(each.arg).removesuffix(RENAMED): _read_value(each.value) for each in node.keywords
    }


def _read_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value) if value not in INFINITE:
            return value
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_read_value(each) for each in values]
        case ast.Dict(keys=keys, values=values):
            return dict(zip(map(_read_key, keys), map(_read_value, values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=bool())):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if value not in INFINITE:
            return -value
    raise ValueError("an argument is a literal")


def _read_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is a string")


def write_calls(rules: CallRules, tokens: GrammarTokens) -> str:
    """A list of calls, whose arguments are in the order of their schemas. Raises UnwritableError."""
    lines: list[str] = []
    call = f"({' | '.join(_write_call(name, *schema, lines) for name, schema in rules.schemas.items())})"
    calls = f'"[" {call} {f"""(", " {call})*""" if rules.several else ""} "]"'
    if tokens.find(START) is not None and tokens.find(END) is not None:
        calls = f"({calls} | {tokens.write_mark(START)} {calls} {tokens.write_mark(END)})"
    return write_leading_calls("[", calls, rules) + "".join(lines)


def _write_call(name: str, schema: Mapping[str, Any], strict: bool, lines: list[str]) -> str:
    function = read_function(schema, strict)
    for each in (name, *(argument.name for argument in function.arguments)):
        if not (each.isidentifier() and each.isascii()):
            raise UnwritableError(f"{each!r} is no name of Python, in which the model writes calls")
    return f'{write_text(f"{name}(")} {_write_arguments(function, lines)} ")"'


def _write_arguments(function: Function, lines: list[str]) -> str:
    """Arguments with a comma between any two that are there; those that are not required may be missing.

    lines: takes their rules: `_first`, the arguments from one on that begin the list, and `_more`, those that go on.
    """
    first = more = ""
    for argument in reversed(function.arguments):
        rule = f"toka_argument_{len(lines)}"
        lines.append(f"{rule}: {write_text(f'{argument.name}=')} {_write_value(argument.schema, function)}\n")
        begins = f"{rule} {more}"
        goes_on = f'", " {rule} {more}'
        if not argument.is_required:
            begins = f"{begins} | {first}" if first else f"({begins})?"
            goes_on = f'(", " {rule})? {more}'
        lines += [f"{rule}_first: {begins}\n", f"{rule}_more: {goes_on}\n"]
        first, more = f"{rule}_first", f"{rule}_more"
    return first


def _write_value(schema: Any, function: Function) -> str:
    """JSON, whose texts and numbers Python reads alike, but for flags and nothing, which have words of Python."""
    kinds = divide(schema, function)
    literals = [value for kind, value in kinds.found if kind == "literal"]
    words = [repr(value) for value in literals if value is None or isinstance(value, bool)]
    words += [word for kind, _ in kinds.found for word in WORDS.get(kind, ())]
    if not words:
        return function.write_json(schema)
    function.check(kinds)
    others = [
        function.write_json({"const": value} if kind == "literal" else value)
        for kind, value in kinds.found
        if kind not in WORDS and not (kind == "literal" and repr(value) in words)
    ]
    return f"({' | '.join([*map(write_text, words), *others])})"


PYTHONIC = Format(
    name="pythonic",
    signs=(("func_name1(",),),
    fields={"tool_calls": {"open": [START, "["], "at_start": True, "content": "calls"}, "content": {}},
    read_calls=read_list,
    markers=(END,),
    write_calls=write_calls,
)
