from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import tokenizers as small
from toka_async.text.detokenize import Detokenizer
from toka_async.text.tokenizer import Tokenizer

Builder = Callable[[], Tokenizer]
TEXTS = ("你好，世界！", "👩‍👩‍👧‍👦🇩🇪👍🏽", "e\u0301te\u0301 नमस्ते ก็", " the answer\n\n is: 42", "  spaces")


def stream(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int] = ()) -> list[str]:
    edges = [0, *sorted(cuts), len(ids)]
    pieces = [detokenizer.push(ids[low:high]) for low, high in pairwise(edges)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("build", small.ALL)
@given(data=st.data())
def test_pieces_concatenate_to_the_whole_text(build: Builder, data: st.DataObject) -> None:
    tokenizer = build()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))
    skip, continues = data.draw(st.booleans()), data.draw(st.booleans())
    pieces = stream(Detokenizer(tokenizer, skip, continues), ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids, skip, continues)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("build", [small.byte_level, small.byte_fallback])
def test_text_comes_in_whole_characters(build: Builder, text: str) -> None:
    tokenizer = build()
    ids = tokenizer.encode(text)
    pieces = stream(Detokenizer(tokenizer), ids, range(len(ids)))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_a_character_is_sent_with_its_last_byte() -> None:
    tokenizer = small.byte_fallback()
    ids = [3 + byte for byte in "好".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "好"]


def test_an_incomplete_character_is_replaced_at_the_end_only() -> None:
    detokenizer = Detokenizer(small.byte_fallback())
    assert detokenizer.push([3 + byte for byte in "a好".encode()[:-1]]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_a_continued_text_keeps_its_leading_space() -> None:
    tokenizer = small.byte_fallback()
    ids = tokenizer.encode("the answer", add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "the answer"
    assert "".join(stream(Detokenizer(tokenizer, continues=True), ids)) == " the answer"
