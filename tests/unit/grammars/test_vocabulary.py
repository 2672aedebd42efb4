from __future__ import annotations

import pytest

from tests.cases.grammars import DEMO, END_IDS, NUM_TOKENS, load_tokenizer, make_vocabulary
from toka_async.grammars.errors import GrammarError
from toka_async.grammars.lark import make_grammar, write_json
from toka_async.grammars.vocabulary import GrammarVocabulary, shorten_error
from toka_async.text.tokenizer import read_for_grammars


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ("start: (", "Expected token"),
        ("start: /a(/", "unclosed group"),
        ('start: %json {"x-guidance": {"lenient": false}, "type": "array", "uniqueItems": true}', "uniqueItems"),
        ("start: <nothing>", "unknown special token"),
    ],
)
def test_errors_are_one_line_that_says_why(grammar: str, error: str) -> None:
    with pytest.raises(GrammarError, match=error) as raised:
        make_vocabulary().check(grammar)
    assert "\n" not in str(raised.value)


def test_special_tokens_are_known_by_name() -> None:
    make_vocabulary().check('start: "a" <|im_end|>')


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_grammars_alone() -> None:
    vocabulary = GrammarVocabulary(lambda: "{}", NUM_TOKENS, END_IDS)
    with pytest.raises(GrammarError, match="do not work with this tokenizer"):
        vocabulary.check('start: "a"')


def test_a_tokenizer_is_waited_for_whatever_becomes_of_it() -> None:
    for read in (lambda: read_for_grammars(DEMO), lambda: "{}"):
        vocabulary = GrammarVocabulary(read, NUM_TOKENS, END_IDS)
        vocabulary.wait()
        assert vocabulary._tokens.done()


def test_ids_above_the_tokenizer_are_never_allowed() -> None:
    wide = GrammarVocabulary(lambda: read_for_grammars(DEMO), 1000, END_IDS)
    mask = wide.compile("start: /(.|\\n)*/").compute_bitmask()
    assert len(mask) == 4 * -(-1000 // 32)
    assert not any(mask[NUM_TOKENS // 8 :])


def test_long_errors_are_cut() -> None:
    assert shorten_error("x" * 5000).endswith("x…")
    assert shorten_error("at 1(8): failed to compile JSON schema: bad\n   1 | start: x\n   ^") == "bad"


def test_a_grammar_without_an_end_is_refused_in_words() -> None:
    with pytest.raises(GrammarError, match=r"it has no end, so no output matches it$"):
        make_vocabulary().check(make_grammar(write_json({"$ref": "#"}, strict=True)))


def test_classes_of_tokens_change_no_mask() -> None:
    from llguidance import LLMatcher, LLTokenizer

    text = '{"a": "Zoë said", "b": 12}'
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}}}
    grammar = make_grammar(write_json(schema, strict=True))
    plain = LLMatcher(
        LLTokenizer(read_for_grammars(DEMO), n_vocab=NUM_TOKENS, eos_token=[*END_IDS], slices=[]), grammar
    )
    ours = make_vocabulary().compile(grammar)
    for token in load_tokenizer().encode(text, False):
        assert ours.compute_bitmask() == plain.compute_bitmask()
        assert ours.consume_token(token)
        assert plain.consume_token(token)
