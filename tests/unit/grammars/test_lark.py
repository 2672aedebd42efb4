from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.cases.grammars import load_tokenizer, make_vocabulary, matches
from toka_async.grammars.errors import GrammarError
from toka_async.grammars.lark import (
    MAX_EBNF,
    make_grammar,
    read_grammar,
    write_choice,
    write_json,
    write_regex,
    write_text,
)

SUITE = Path(__file__).parents[2] / "cases" / "json_schema_suite.json"


def test_only_choices_match() -> None:
    grammar = make_grammar(write_choice(["yes", "no", 'é😀\n"/']))
    assert all(matches(grammar, text) for text in ("yes", "no", 'é😀\n"/'))
    assert not any(matches(grammar, text) for text in ("ye", "yes ", "Yes", ""))


def test_thousands_of_choices_are_followed_to_their_ends() -> None:
    grammar = make_grammar(write_choice([f"choice no. {number} of many" for number in range(5000)]))
    assert matches(grammar, "choice no. 4711 of many")
    assert not matches(grammar, "choice no. 5000 of many")


def test_a_regular_expression_matches_the_whole_text() -> None:
    grammar = make_grammar(write_regex(r'[a-c]{2}/\d+\n"x"'))
    assert matches(grammar, 'ab/17\n"x"')
    assert not matches(grammar, 'ab/17\n"x"y')
    assert not matches(grammar, 'xab/17\n"x"')


def test_long_ebnf_is_refused_and_long_lark_is_not() -> None:
    """A server reads it where its other requests wait."""
    with pytest.raises(GrammarError, match="write it in Lark"):
        read_grammar('root ::= "a"' + " " * MAX_EBNF)
    assert read_grammar('start: "a"' + " " * MAX_EBNF)


def test_ebnf_and_lark_are_read() -> None:
    ebnf = read_grammar('root ::= "a" [0-9]+ rest\nrest ::= "b" | "c" rest')
    assert matches(ebnf, "a12ccb")
    assert not matches(ebnf, "a12cc")
    assert matches(read_grammar('start: "x" word\nword: /[a-z]+/'), "xyz")
    with pytest.raises(GrammarError, match="neither Lark nor EBNF"):
        read_grammar("root ::= (((")


def test_expressions_are_parts_of_larger_grammars() -> None:
    call = write_json({"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}}, strict=False)
    grammar = make_grammar(f"{write_text('<call>')} {call} {write_text('</call>')}")
    assert matches(grammar, '<call>{"a": 1}</call>')
    assert not matches(grammar, '<call>{"a": 2}</call>')


def test_blanks_are_bounded_unless_the_caller_says_how_they_are() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    grammar = make_grammar(write_json(schema, strict=True))
    assert matches(grammar, "[\n" + " " * 20 + "1\n]")
    assert not matches(grammar, "[\n" + " " * 21 + "1]")
    assert not matches(grammar, "[\n\n1]")
    compact = make_grammar(write_json(schema, strict=True, options={"whitespace_flexible": False}))
    assert matches(compact, "[1,2]")
    assert not matches(compact, "[1, 2]")
    own = make_grammar(write_json({**schema, "x-guidance": {"whitespace_pattern": "_"}}, strict=True))
    assert matches(own, "[_1]")


def test_strict_refuses_by_name_what_else_is_left_out() -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        make_vocabulary().compile(make_grammar(write_json(schema, strict=True)))
    assert matches(make_grammar(write_json(schema, strict=False)), "[1,1]")


@pytest.mark.parametrize("schema", [True, {}])
def test_a_schema_that_forbids_nothing_takes_any_json(schema: bool | dict[str, object]) -> None:
    grammar = make_grammar(write_json(schema, strict=True))
    assert all(matches(grammar, text) for text in ("1", '"a"', "[null, {}]"))


def test_a_schema_that_forbids_all_is_refused() -> None:
    for strict in (True, False):
        with pytest.raises(GrammarError, match="the schema is false"):
            write_json(False, strict=strict)


def test_patterns_that_are_too_much_work_are_named() -> None:
    words = ("red", "green", "blue", "yellow", "black", "white", "brown", "pink", "grey", "cyan", "lime", "teal")
    schema = {"type": "string", "allOf": [{"pattern": word} for word in words]}
    with pytest.raises(GrammarError, match=r"^pattern: .* allOf asks$"):
        make_vocabulary().compile(make_grammar(write_json(schema, strict=True)))


def test_a_schema_within_lark_does_not_end_the_process() -> None:
    """The library would call itself without end: a segmentation fault."""
    assert matches(read_grammar('start: "a" %json {"const": [-5, "%json"]}'), 'a[-5,"%json"]')
    with pytest.raises(GrammarError, match="does not end"):
        read_grammar('start: %json { "const": [-9223372036854775808] }')


def test_the_official_suite_has_no_invalid_document_that_strict_accepts() -> None:
    """Counts are of llguidance 1.9: newer ones may take more schemas, and refuse fewer valid documents."""
    cases = json.loads(SUITE.read_text())["cases"]
    tokenizer, vocabulary = load_tokenizer(), make_vocabulary()
    accepted_invalid, unnamed, counts = [], [], {"refused": 0, "right": 0, "valid_refused": 0}
    for _, schema, documents in cases:
        try:
            matcher = vocabulary.compile(make_grammar(write_json(schema, strict=True)))
        except GrammarError as error:
            counts["refused"] += 1
            unnamed += [schema] * (not str(error))
            continue
        for document, is_valid in documents:
            ids = tokenizer.encode(json.dumps(document, ensure_ascii=False), False)
            row = matcher.deep_copy()
            is_accepted = row.try_consume_tokens(ids) == len(ids) and row.is_accepting()
            if is_accepted and not is_valid:
                accepted_invalid.append((schema, document))
            else:
                counts["right" if is_accepted == is_valid else "valid_refused"] += 1
    assert not accepted_invalid
    assert not unnamed
    assert len(cases) == 368
    assert counts["refused"] <= 204
    assert counts["valid_refused"] <= 22
    assert counts["right"] >= 567


def test_the_oracle_of_the_suite_agrees_with_it() -> None:
    """The pinned copy was not damaged: `jsonschema` finds the same of the groups that need no other documents."""
    cases = json.loads(SUITE.read_text())["cases"]
    simple = [case for case in cases if case[0] in ("type", "properties", "enum", "anyOf", "maxLength")]
    for _, schema, documents in simple:
        validator = jsonschema.Draft202012Validator(schema)
        assert [validator.is_valid(document) for document, _ in documents] == [valid for _, valid in documents]
