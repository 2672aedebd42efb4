from __future__ import annotations

import json

import pytest

from tests.cases.grammars import matches
from toka_async.grammars.errors import GrammarError
from toka_async.grammars.lark import make_grammar, write_json
from toka_async.grammars.patterns import translate


def is_match(pattern: str, text: str) -> bool:
    grammar = make_grammar(write_json({"type": "string", "pattern": pattern}, strict=True))
    return matches(grammar, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[\x00-\x1f]$", "\x01\n\x1f", '"\\a'),
        (r"^[\x00-\x0f]$|^[\x10-\x1f]$", "\x01\n\x1f", '"\\a'),
        ('^[^"]$', "a\\\n\x01é", '"'),
        (r"^[^\\]$", 'a"\n', "\\"),
        (r"^(?:a|[^\"\n])$", "a\\b", '"\n'),
        (r"^\D$", 'a"\\', "7"),
        (r"^[^\W]$", "a_7", '"\\-é'),
        (r"^[\W\d]$", '7-é"', "a_"),
        (r"^.$", 'a"\\\t\x85😀', "\n\r\u2028\u2029"),
        (r"^\s$", " \t\n\xa0\ufeff\u2028", "\x85a\u180e"),
        (r"^\S$", 'a\x85"', " \xa0\ufeff"),
        (r"^\d$", "7", "a\u0661"),
        (r"^\w$", "a_7", "é-"),
        (r"^[\w-.]$", "a-.", ","),
        (r"^[a\-z]$", "a-z", "b"),
        (r"^[a-c[-]$", "abc[-", "]d"),
        (r"^\u0061|\x62|\ud83d\ude00$", "ab😀", "c"),
        (r"^[\ud83d\ude00-\ud83d\ude02]$", "😀😁😂", "a"),
        (r"^\cA$", "\x01", "A"),
        (r"^[\b]$", "\b", "b"),
        (r"^\p{Lu}$", "AÉ", "a1"),
        (r"^\P{Lu}$", 'a1"\\', "A"),
        (r"^\/[/]?$", "/", "a"),
        (r"^(?<n>a)(?:b|c)?$", "a", "b"),
        (r"^}|]$", "}]", "a"),
        (r"(^a|b)$|^c", "abc", "d"),
    ],
)
def test_a_pattern_means_what_ecma_says(pattern: str, right: str, wrong: str) -> None:
    assert [each for each in right if not is_match(pattern, each)] == []
    assert [each for each in wrong if is_match(pattern, each)] == []


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("a{2}b{1,}c{0,2}?$", ["aab", "xaabbcc"], ["ab", "aac", "aabccc"]),
        ("(^|,)a(,|$)", ["a", "b,a", "a,b"], ["ba", "ab"]),
        ("^(a|b)*?c+$", ["c", "abcc"], ["ab"]),
        ("", ["", "a"], []),
    ],
)
def test_texts_match_as_a_whole_or_in_part(pattern: str, texts: list[str], others: list[str]) -> None:
    assert all(is_match(pattern, each) for each in texts)
    assert not any(is_match(pattern, each) for each in others)


@pytest.mark.parametrize(
    "pattern",
    [
        *("[a-z&&[b]]", "[[:alpha:]]", "a(?i)b", "(?i)a", "(?i:a)", r"\u{61}", r"\x{61}", r"\pL", "(?P<n>a)", "(?x) a"),
        *(r"\Aa", r"a\z", r"\a", r"\e", r"\Qa\E", r"a\b", r"\Ba", r"(a)\1", r"\0", r"^\x00$", r"[\x00]", r"\u0000"),
        *("(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "[]a]", "[^]", "[", "[a", "(", ")", "*a", "a**", "a{2}+", "a*+", "{"),
        *(
            "a{,3}",
            "[b-a]",
            "a^b",
            "x*^a",
            "(a$)b",
            "^(a|b$)c?",
            "(^a)*",
            "^*",
            "$^",
            r"\ud83d",
            "\\",
            r"\p{Greek}",
            "[a-",
        ),
    ],
)
def test_what_only_one_dialect_has_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(GrammarError):
        translate(pattern)
    with pytest.raises(GrammarError, match=r"^pattern: "):
        write_json({"pattern": pattern}, strict=True)
    with pytest.raises(GrammarError, match=r"^patternProperties: "):
        write_json({"patternProperties": {pattern: {}}}, strict=True)
    assert '"pattern"' not in write_json({"pattern": pattern}, strict=False)
