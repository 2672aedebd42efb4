from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import tokenizers as small
from toka_async.text.pieces import build_pieces, strip_start
from toka_async.text.tokenizer import Tokenizer

Builder = Callable[[], Tokenizer]
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def piece_of(token: str, *parts: dict[str, Any], first: bool = False) -> bytes:
    pieces = build_pieces({0: token}, frozenset(), {"type": "Sequence", "decoders": parts})
    return (pieces.first if first else pieces.rest)[0]


@pytest.mark.parametrize("build", small.ALL)
@given(data=st.data())
def test_decodes_as_the_library_does(build: Builder, data: st.DataObject) -> None:
    tokenizer = build()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    skip = data.draw(st.booleans())
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    if build is small.byte_fallback and "\ufffd" in expected:
        return  # a run of byte tokens that has invalid bytes: the library gives up its valid characters
    assert tokenizer.decode(ids, skip) == expected


def test_a_run_of_byte_tokens_keeps_its_valid_characters() -> None:
    tokenizer = small.byte_fallback()
    ids = [3 + byte for byte in "你".encode() + "好".encode()[:2]]
    assert tokenizer.decode(ids) == "你\ufffd"


def test_invalid_bytes_between_tokens() -> None:
    tokenizer = small.byte_fallback()
    start, word = 3 + 0xE4, tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode([start, *word], continues=True) == "\ufffd the"


def test_special_tokens_do_not_split_a_character() -> None:
    tokenizer = small.byte_fallback()
    ids = [3 + byte for byte in "好".encode()]
    assert tokenizer.decode([ids[0], 1, *ids[1:]]) == "好"
    assert tokenizer.decode([ids[0], 1, *ids[1:]], skip_special_tokens=False) == "\ufffd<s>\ufffd\ufffd"


def test_stages_on_single_tokens() -> None:
    assert piece_of("▁a▁", REPLACE) == b" a "
    assert piece_of("  a ", {"type": "Strip", "content": " ", "start": 1, "stop": 2}) == b" a"
    assert piece_of("▁a▁b", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}, first=True) == b" a b"
    assert piece_of("▁a▁b", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}, first=True) == b"ab"
    assert piece_of("<0x0A>", {"type": "ByteFallback"}) == b"\n"
    assert piece_of("<0x0AA>", {"type": "ByteFallback"}) == b"<0x0AA>"
    assert piece_of("Ġ☃", {"type": "ByteLevel"}) == "Ġ☃".encode()


@pytest.mark.parametrize(
    "parts",
    [
        ({"type": "CTC"},),
        ({"type": "BPEDecoder", "suffix": "</w>"},),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},),
        ({"type": "Fuse"}, REPLACE),
        ({"type": "ByteFallback"}, REPLACE),
        ({"type": "Fuse"}, STRIP, STRIP),
        ({"type": "Fuse"}, STRIP | {"stop": 1}),
    ],
)
def test_other_decoders_are_refused(parts: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(ValueError, match="not supported"):
        piece_of("a", *parts)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [("  a", 1, (" a", 0)), (" ", 1, ("", 0)), (" ", 3, ("", 2)), ("a ", 2, ("a ", 0)), ("", 1, ("", 1))],
)
def test_strip_start(text: str, count: int, expected: tuple[str, int]) -> None:
    assert strip_start(text, " ", count) == expected
