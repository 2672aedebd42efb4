from __future__ import annotations

import pytest

from tests.cases import tokenizers as small
from toka_async.text.tokenizer_files import TokenizerError


def test_special_tokens_in_text_are_parsed() -> None:
    tokenizer = small.byte_level()
    assert tokenizer.encode("</s>") == [tokenizer.eos_token_id]
    assert tokenizer.decode([tokenizer.eos_token_id or 0], skip_special_tokens=False) == "</s>"


def test_batches_equal_single_texts() -> None:
    tokenizer, texts = small.byte_fallback(), ["", "the", "你好 😀", " x"]
    batch = tokenizer.encode_batch(texts)
    assert batch == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(ids) for ids in batch] == texts
    assert tokenizer.encode_batch([], add_special_tokens=False) == []


def test_ids_outside_of_the_vocabulary_have_no_text() -> None:
    tokenizer = small.byte_level()
    ids = tokenizer.encode("the")
    assert tokenizer.decode([-1, *ids, tokenizer.vocab_size, 1 << 40]) == "the"
    assert (tokenizer.token_text(1 << 20), tokenizer.token_bytes(1 << 20)) == ("", b"")


def test_token_text_and_bytes() -> None:
    level, fallback = small.byte_level(), small.byte_fallback()
    part = level.encode("☕")[0]
    assert level.token_bytes(part) == b"\xe2"
    assert level.token_text(part) == "\ufffd"
    assert level.token_text(level.encode("the answer")[-1]) == " answer"
    assert fallback.token_text(fallback.encode("the")[-1]) == " the"
    assert fallback.token_text(1) == "<s>"
    assert fallback.token_bytes(3 + 0xE4) == b"\xe4"


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "你\udc00"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at character"):
        small.byte_level().encode_batch(["fine", text])
