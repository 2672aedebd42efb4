"""Jinja's sandbox with a limit on what a template computes.

The sandbox separates a template from everything outside of it. But `'x'.ljust(10**10)` or `s + s` in a loop would take
all memory, and a macro that calls itself twice all time. So each rendering has a budget: operations that make values
larger spend the new size in advance, and loops and calls spend a little each. Nothing is computed when a template is
compiled. Work that makes nothing larger, such as comparing long strings over and over, is not limited. Knows Jinja;
knows no chats.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_WORK = 1 << 27  # the budget of a rendering: characters and elements made, plus the next three
CALL, STEP, ELEMENT = 512, 32, 32  # costs of a call or filter, of a turn of a loop, of an element of a list
MAX_BITS = 1 << 12  # in an integer
MAX_WIDTH = 4  # digits of a width or precision in a format
SHORT = 64  # characters of a template's own text that a turn of a loop pays for
BUDGET = " budget"  # the budget's name in a template's context; no template can spell it
COUNTED = " counted"

REMOVED = ("batch", "center", "pprint", "slice", "urlize", "wordwrap", "xmlattr")  # filters that no chat template needs
WRITING = frozenset(  # filters that write a whole value of any type
    {"capitalize", "e", "escape", "filesizeformat", "forceescape", "join", "lower", "string", "striptags", "sum"}
    | {"title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount"}
)
_PADDED = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})
GROWING = _PADDED | {"expandtabs", "format", "format_map", "join", "replace", "translate"}  # methods
_LONG_NUMBER = re.compile(rf"\d{{{MAX_WIDTH + 1}}}")
_STAR = re.compile(r"%[^%a-zA-Z]*\*")


class Budget:
    """The work that a rendering may still do."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_WORK

    def spend(self, amount: int) -> None:
        """Raises OverflowError when `amount` exceeds what is left."""
        self.left -= amount
        if self.left < 0:
            raise OverflowError(f"it makes more than {MAX_WORK} characters and elements, or takes as many steps")


def measure_text(value: object, most: int) -> int:
    """Returns a lower bound of the characters of a written `value`; stops soon above `most`.

    A part that occurs twice counts twice.
    """
    if type(value) is str:
        return len(value)
    left, size = [value], 0
    while left and size <= most:
        value = left.pop()
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, int):
            size += 1 + value.bit_length() // 3
        elif isinstance(value, Mapping):
            size += ELEMENT * len(value)
            left += value.keys()
            left += value.values()
        elif isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            size += ELEMENT * (1 + len(value))
            left += value
        elif isinstance(value, Namespace):
            size += ELEMENT
            left.append(value._Namespace__attrs)
        else:
            size += ELEMENT
    return size


def measure_length(value: object) -> int:
    """Returns the cost of a new value."""
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, list | tuple | dict) else 0


class _Code(CodeGenerator):
    """Compiles `~` to a call of the environment, as the sandbox does for other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  Jinja's name
        self.write("environment.concatenate(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that spends each rendering's Budget, which its context has under BUDGET."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=_spend_text)
        for name in REMOVED:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: _bound_filter(name, each) for name, each in self.filters.items()}
        self.filters[COUNTED] = _count_turns

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _bound_filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, COUNTED, [], [], None, None, lineno=loop.lineno)
        for output in tree.find_all(nodes.Output):  # long texts are finalized, and so counted
            output.nodes = [
                nodes.Const(each.data, lineno=each.lineno)
                if isinstance(each, nodes.TemplateData) and len(each.data) > SHORT
                else each
                for each in output.nodes
            ]
        tree.set_environment(self)
        return tree

    def concatenate(self, context: Context, parts: tuple[object, ...]) -> str:
        """Evaluates `~`."""
        budget = find_budget(context)
        budget.spend(STEP + sum(measure_text(part, budget.left) for part in parts))
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = find_budget(context)
        if type(left) is str and type(right) is str and operator == "+":  # by far the most frequent
            budget.spend(STEP + len(left) + len(right))
            return left + right
        budget.spend(STEP)
        if operator == "%":
            if isinstance(left, str | bytes):
                budget.spend(_format_size(left, "%", right, budget.left))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise OverflowError("** makes a number that is too large")
        elif operator == "*":
            budget.spend(_product_size(left, right))
        else:
            budget.spend(measure_length(left) + measure_length(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = find_budget(context)
        budget.spend(CALL)
        name = getattr(function, "__name__", "")
        if name in GROWING:
            method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
            owner = getattr(method, "__self__", None)
            if name == "join" and len(args) == 1:
                args = (list(args[0]),)
            if isinstance(owner, str | bytes | int):
                budget.spend(_method_size(owner, name, args, kwargs, budget.left))
        elif isinstance(function, LoopContext):  # a recursive loop
            args = tuple(_count_turns(context, each) for each in args)
        result = super().call(context, function, *args, **kwargs)
        budget.spend(measure_length(result))
        return result


def find_budget(context: Context) -> Budget:
    return cast(Budget, context.parent[BUDGET])  # the parent has the arguments of a rendering


@pass_context
def _spend_text(context: Context, value: Any) -> Any:
    """Spends the size of a value that goes into the prompt, or into a variable by a block."""
    budget = find_budget(context)
    budget.spend(len(value) if type(value) is str else measure_text(value, budget.left))
    return value


@pass_context
def _count_turns(context: Context, values: Any) -> Any:
    """Spends a step for each element that a loop visits."""
    budget = find_budget(context)
    if isinstance(values, Sized):
        budget.spend(STEP * len(values))
        return values
    return _count_each(budget, values)


def _count_each(budget: Budget, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        budget.spend(STEP)
        yield value


def _bound_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that spends what it makes."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    is_whole, is_written = name in ("join", "list", "sum", "sort", "unique", "reverse"), name in WRITING
    adds = name in ("join", "indent", "replace", "format", "tojson")

    @pass_context
    def bounded(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        budget = find_budget(context)
        budget.spend(CALL)
        if is_whole and not isinstance(value, Sized):
            value = list(_count_each(budget, value))
        if is_written:
            budget.spend(measure_text(value, budget.left))
        if adds:
            budget.spend(_filter_size(name, value, args, kwargs, budget.left))
        match passed:
            case "":
                result = function(value, *args, **kwargs)
            case "context":
                result = function(context, value, *args, **kwargs)
            case "eval_context":
                result = function(context.eval_ctx, value, *args, **kwargs)
            case _:
                result = function(context.environment, value, *args, **kwargs)
        budget.spend(measure_length(result))
        return result

    return bounded


def _product_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise OverflowError("* makes a number that is too large")
        return 0
    sizes = [
        measure_length(value) * max(times, 0)
        for value, times in ((left, right), (right, left))
        if isinstance(times, int) and isinstance(value, Sized)
    ]
    return sum(sizes)


def _filter_size(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> int:
    """Returns what a filter adds to its value."""
    given = (*args, *kwargs.values())
    widths = [each for each in given if isinstance(each, int)]
    match name:
        case "join":
            return len(value) * max((measure_text(each, most) for each in given), default=0)
        case "indent":
            texts = [len(each) for each in given if isinstance(each, str)]
            return (1 + str(value).count("\n")) * max([*widths, *texts, 4])
        case "replace":
            return _method_size(str(value), "replace", tuple(map(str, given[:2])), {}, most)
        case "format":
            return _format_size(str(value), "%", given, most)
        case "tojson":
            texts = [len(each) for each in given if isinstance(each, str)]
            seps = [len(str(each)) for pair in given if isinstance(pair, tuple) for each in pair]
            if max([*widths, *texts, *seps], default=0) > 32:
                raise OverflowError("tojson with such an indent or such separators is not allowed")
    return 0


def _method_size(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> int:
    """Returns an upper bound of what a method of a string, bytes or a number makes."""
    if name in _PADDED:
        return max((each for each in (*args, *kwargs.values()) if isinstance(each, int)), default=1)
    if isinstance(owner, int):
        return 0
    if name in ("format", "format_map"):
        return _format_size(owner, "{", (*args, kwargs), most)
    if name == "join":
        return len(owner) * len(args[0]) + measure_text(args[0], most) if args else 0
    if name == "replace" and len(args) > 1:
        return len(owner) + cast(int, owner.count(args[0])) * len(args[1])
    if name == "translate":
        return len(owner) * measure_text(args, most)
    if name == "expandtabs":
        return len(owner) * max((each for each in (*args, *kwargs.values()) if isinstance(each, int)), default=8)
    return len(owner)


def _format_size(text: Any, sign: str, given: Any, most: int) -> int:
    """Returns an upper bound of a format's result: each of its places may have all that is given."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if _LONG_NUMBER.search(text) or (sign == "%" and _STAR.search(text)):
        raise OverflowError(f"a format with widths of more than {MAX_WIDTH} digits, or with * is not allowed")
    if sign == "{" and any("{" in (spec or "") for _, _, spec, _ in string.Formatter().parse(text)):
        raise OverflowError("a format with places in places is not allowed")
    width = max(map(int, re.findall(r"\d+", text)), default=0)
    return len(text) + cast(int, text.count(sign)) * (width + measure_text(given, most))
