"""The pythonic format of Llama 3.2 and Llama 4: the whole answer is a list of calls, `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import keyword
import re
from typing import Any

from toka_async.text.formats.format import Format

START, END = "<|python_start|>", "<|python_end|>"
MAX_CHARS = 1 << 20  # of a list that is read
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")  # characters that Python knows after a backslash
# Strings, and arguments whose names are Python's keywords, which a call cannot have.
KEYWORD = re.compile(rf"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\b({"|".join(keyword.kwlist)})(?=\s*=[^=])""", re.DOTALL)
RENAMED = "__keyword"
INFINITE = (float("inf"),)  # `1e999`
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


PYTHONIC = Format(
    name="pythonic",
    signs=(("func_name1(",),),
    fields={"tool_calls": {"open": [START, "["], "at_start": True, "content": "calls"}, "content": {}},
    read_calls=read_list,
    markers=(END,),
)
