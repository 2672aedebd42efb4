from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.text.formats.partial import compile_partial, compile_pattern

PATTERNS = {
    r"\s*<a>\s*<f=(?P<name>[^>\n]+)>": ["<a><f=x>", " \n<a>  <f=ab>"],
    r"a(?:bc|de)*f": ["af", "abcdef", "adebcf"],
    r"(?:^|<t>\s*)": ["", "<t>", "<t>  "],
    r"x{2,4}?[^\d]\w+\.": ["xx_a.", "xxxx ab."],
    r"</f>\s*</c>|<e>": ["</f></c>", "</f>\n</c>", "<e>"],
    r"a+?b?.c": ["axc", "aabxc"],
}


@pytest.mark.parametrize(("pattern", "matches"), PATTERNS.items())
def test_every_beginning_of_a_match_is_found(pattern: str, matches: list[str]) -> None:
    partial = compile_partial(pattern)
    for match in matches:
        assert compile_pattern(pattern).fullmatch(match)
        for end in range(len(match) + 1):
            assert partial.fullmatch(match[:end]), match[:end]
            found = partial.search("ZZ" + match[:end])
            assert found is not None
            assert found.start() <= 2 or pattern.startswith("(?:^")


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text("ab<f=>\n xcdet/_.", max_size=10), more=st.text("ab<f=>\n xcdet/_.", max_size=6))
def test_what_is_found_is_never_too_late(pattern: str, text: str, more: str) -> None:
    """A match that more text completes begins where one was expected, or after it."""
    found = compile_partial(pattern).search(text)
    assert found is not None
    assert found.end() == len(text)
    for start in range(found.start()):
        match = re.compile(pattern, re.DOTALL).match(text + more, start)
        assert match is None or match.end() < len(text)


@pytest.mark.parametrize("pattern", [r"a(?=b)", r"(a)\1", r"(?i)a", r"(?P<n>a)(?(n)b|c)"])
def test_what_a_beginning_does_not_show_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="a pattern cannot have"):
        compile_partial(pattern)


def test_what_is_no_pattern() -> None:
    with pytest.raises(ValueError, match="is no regular expression"):
        compile_partial("(")
