from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toka_async.text import sandbox
from toka_async.text.sandbox import BUDGET, BoundedEnvironment, Budget

MESSAGES = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "a\nb"}]
GROW = "{% set ns = namespace(s=S) %}{% for i in range(60) %}{% set ns.s = E %}{% endfor %}"


def render(source: str) -> str:
    names: dict[str, Any] = {"messages": MESSAGES, BUDGET: Budget()}
    return BoundedEnvironment().from_string(source).render(names)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A gigabyte more than there is: whatever slips through is a MemoryError."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "source",
    [
        "{% set a = [1] * 60000000 %}{% for i in a %}{% for j in a %}{% endfor %}{% endfor %}",
        "{% for i in 'x' * 20000 %}{% for i in 'x' * 20000 %}{% endfor %}{% endfor %}",
        GROW.replace("S", "'xxxx'").replace("E", "ns.s + ns.s"),
        GROW.replace("S", "'xxxx'").replace("E", "ns.s ~ ns.s"),
        GROW.replace("S", "[1, 2]").replace("E", "ns.s + ns.s"),
        GROW.replace("S", "(1, 2)").replace("E", "ns.s * 2"),
        GROW.replace("S", "[1, 2]").replace("E", "[ns.s, ns.s]") + "{{ ns.s }}",
        GROW.replace("S", "[1, 2]").replace("E", "[ns.s, ns.s]") + "{{ ns.s | tojson }}",
        GROW.replace("S", "[1, 2]").replace("E", "[ns.s, ns.s]") + "{% set a = ns.s | string %}",
        GROW.replace("S", "[1, 2]").replace("E", "[ns.s, ns.s]") + "{% set a = 'x' ~ ns.s %}",
        GROW.replace("S", "[1, 2]").replace("E", "[ns.s, ns.s]") + "{% set a = '%s' % (ns.s,) %}",
        GROW.replace("S", "[1, 2]").replace("E", "[ns.s, ns.s]") + "{% set a = '{}'.format(ns.s) %}",
        GROW.replace("S", "namespace(a=1)").replace("E", "namespace(a=ns.s, b=ns.s)") + "{{ ns.s }}",
        GROW.replace("S", "'xxxx'").replace("{% set ns.s = E %}", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
        GROW.replace("S", "9").replace("E", "ns.s * ns.s"),
        GROW.replace("S", "9").replace("E", "ns.s ** 3"),
        "{% set a = 'x'.ljust(6000000000) %}",
        "{% set a = 'x'.rjust(6000000000) %}",
        "{% set a = 'x'.center(6000000000, 'y') %}",
        "{% set a = 'x'.zfill(6000000000) %}",
        "{% set a = '\\t'.expandtabs(6000000000) %}",
        "{% set a = (1).to_bytes(6000000000, 'big') %}",
        "{% set a = 'x'.encode().ljust(6000000000) %}",
        "{% set a = '%06000000000d' % 1 %}",
        "{% set a = '%*d' % (6000000000, 1) %}",
        "{% set a = '%.6000000000f' % 1 %}",
        "{% set a = '%06000000000d' | format(1) %}",
        "{% set a = '{:>6000000000}'.format(1) %}",
        "{% set a = '{:{}}'.format(1, 6000000000) %}",
        "{% set a = '{a:>6000000000}'.format_map({'a': 1}) %}",
        "{% set a = ('{0}' * 10000).format('x' * 100000) %}",
        "{% set a = ('%(a)s' * 10000) % {'a': 'x' * 100000} %}",
        "{% set a = ('x' * 80000).replace('x', 'y' * 80000) %}",
        "{% set a = ('x' * 80000) | replace('x', 'y' * 80000) %}",
        "{% set a = ('y' * 80000).join('x' * 80000) %}",
        "{% set a = ('x' * 80000) | join('y' * 80000) %}",
        "{% set a = ['x' * 80000] * 80000 %}{% set a = ''.join(a) %}",
        "{% set a = ['x' * 80000] * 80000 %}{% set a = a | join %}",
        "{% set a = [[1] * 10000] * 20000 %}{% set a = a | sum(start=[]) %}",
        "{% set a = ('x' * 80000).translate({120: 'y' * 80000}) %}",
        "{% set a = ('x\\n' * 400000) | indent(400000) %}",
        "{% set a = messages | tojson(indent=1000000000) %}",
        "{% macro a(x) %}{% if x > 0 %}{{ a(x - 1) }}{{ a(x - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
        "{% set a %}{% for i in range(1000000) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
        "{% for i in range(10) recursive %}{{ loop(range(1000000) | list) }}{% endfor %}",
    ],
)
def test_what_takes_too_much_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_WORK", 1 << 21)
    with pytest.raises((OverflowError, RecursionError)):
        render(source)


@pytest.mark.parametrize("name", sandbox.REMOVED)
def test_filters_that_no_chat_template_needs_are_not_there(name: str) -> None:
    with pytest.raises(Exception, match=f"No filter named '{name}'"):
        render("{{ 'x' | %s }}" % name)  # noqa: UP031  a template is full of braces


def test_nothing_is_computed_when_a_template_is_compiled() -> None:
    template = BoundedEnvironment().from_string("{{ 'x' * 99999999 }}{{ 'x' ~ 'y' }}{{ 'ab' | upper }}")
    with pytest.raises(OverflowError):
        template.render({BUDGET: Budget()})


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '!' ~ loop.index0 }}{{ loop.last }}{% endfor %}",
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.length }}"
        "{{ m.content | trim }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.content }}{% else %}none{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0] | items | list }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | map(attribute='role') | list | length }}",
        "{{ 'a-b-c'.split('-') | join }}{{ 'x' * 3 }}{{ 3 * 'y' }}{{ [1] * 2 }}{{ 2 ** 10 }}{{ 2.5 * 2 }}{{ 7 % 4 }}",
        "{{ '%s and %05.2f' % ('a', 1.5) }}{{ '{} {:>4}'.format('a', 1) }}{{ '%s' | format('x') }}",
        "{{ messages[1].content | indent(2) }}{{ 'a b' | replace(' ', '') }}{{ 'abc'.replace('b', 'xx') }}",
        "{{ messages[::-1][0].role }}{{ messages | length }}{{ 'x'.ljust(5) }}|{{ 'ab' | first }}{{ none is none }}",
        "{% macro say(m, end='.') %}{{ m.content }}{{ end }}{% endmacro %}{{ say(messages[0]) }}"
        "{{ say(messages[1], end='') }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ 1 + 2.5 }}",
        "{% set x %}" + "long text " * 20 + "{{ messages[0].role | upper }}{% endset %}{{ x }}{{ x | length }}",
        "{% filter upper %}a{{ 'b' }}{% endfilter %}{{ [3, 1, 2] | sort }}{{ [1, 2] | sum }}"
        "{{ {'b': 1, 'a': 2} | dictsort }}",
        "{% for a in [1, [2, [3]]] recursive %}{% if a is iterable %}[{{ loop(a) }}]"
        "{% else %}{{ a }}{% endif %}{% endfor %}",
        "{{ messages[0].get('tools', 'none') }}{{ messages[0].content.split(' ')[-1] }}"
        "{{ 'x' in messages[0].content }}",
        "{{ cycler('a', 'b').next() }}{{ dict(a=1) }}{{ [1, 2] + [3] }}{{ 'a' 'b' }}"
        "{{ nothing }}{{ nothing | default('d') }}",
    ],
)
def test_other_templates_render_as_ever(source: str) -> None:
    assert render(source) == ImmutableSandboxedEnvironment().from_string(source).render(messages=MESSAGES)
