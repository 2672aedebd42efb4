from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import tokenizers as small
from toka_async.text.tokenizer import Tokenizer
from toka_async.text.vocabulary import Vocabulary

Builder = Callable[[], Tokenizer]


@pytest.mark.parametrize("build", small.ALL)
@settings(max_examples=40)
@given(data=st.data())
def test_search_equals_looking_at_every_token(build: Builder, data: st.DataObject) -> None:
    tokenizer = build()
    vocabulary, rest, first = Vocabulary(tokenizer), tokenizer.pieces.rest, tokenizer.pieces.first
    piece = data.draw(st.sampled_from([piece for piece in rest.values() if piece]) | st.binary(min_size=1, max_size=3))
    low = data.draw(st.integers(0, len(piece) - 1))
    part = piece[low : data.draw(st.integers(low + 1, len(piece)))]
    assert set(vocabulary.find_starting(part).tolist()) == {i for i in rest if rest[i].startswith(part)}
    assert set(vocabulary.find_containing(part).tolist()) == {i for i in rest if part in rest[i] or part in first[i]}


def test_sizes() -> None:
    tokenizer = small.byte_level()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.size == tokenizer.vocab_size
    assert vocabulary.max_bytes == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))


def test_a_match_across_two_tokens_is_none() -> None:
    tokenizer = small.word_level()
    found = Vocabulary(tokenizer).find_containing(b"answer")
    assert [tokenizer.token_text(i) for i in sorted(set(found.tolist()))] == [" answer"]
    assert Vocabulary(tokenizer).find_containing(b"x" * 10_000).size == 0
