from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import tokenizers as small
from toka_async.messages import Reason
from toka_async.server.engine.token_block import TokenRows
from toka_async.server.generate.sample_text import SampleStream, SampleText, TextOptions, sample_text
from toka_async.text.stop import StopStrings
from toka_async.text.tokenizer import Tokenizer


def rows(ids: list[int]) -> TokenRows:
    count = len(ids)
    none = np.empty((count, 0), np.int32)
    return TokenRows(np.array(ids, np.int32), np.empty(0, np.float32), none, none.astype(np.float32))


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], reason: Reason, options: TextOptions) -> SampleText:
    """The text and the kept tokens of a stream whose tokens come in the portions that `cuts` make."""
    stream, text = SampleStream(tokenizer, options), ""
    ends = [*sorted(cuts), len(ids)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        piece = stream.push(rows(ids[start:end]), reason if end == len(ids) else Reason.NONE)
        text += piece.text
        assert len(piece.offsets) == len(piece.rows)
        if piece.stop is not None:
            return SampleText(text, piece.stop, stream.num_tokens)
    assert stream.num_tokens == len(ids)
    return SampleText(text)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), build=st.sampled_from([small.byte_level, small.byte_fallback, small.metaspace]))
def test_a_stream_is_the_whole(data: st.DataObject, build: Callable[[], Tokenizer]) -> None:
    tokenizer = build()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), min_size=1, max_size=12))
    cuts = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=4, unique=True))
    text = tokenizer.decode(ids, continues=True)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = data.draw(st.sampled_from([text[start : start + 3], text[start : start + 1], "the", "好"]))
    options = TextOptions(
        skip_special_tokens=data.draw(st.booleans()),
        stops=StopStrings([stop or "x"], include=data.draw(st.booleans())),
        min_tokens=data.draw(st.integers(0, 3)),
    )
    expected = sample_text(tokenizer, ids, options)
    assert streamed(tokenizer, ids, cuts, Reason.LENGTH, options) == expected
    if expected.stop is not None:
        assert expected.num_tokens > options.min_tokens


@pytest.mark.parametrize("kept", [False, True])
def test_the_end_token(kept: bool) -> None:
    tokenizer = small.byte_level()
    ids = tokenizer.encode("the end")
    options = TextOptions(keep_ends=kept)
    num_text = options.num_text_tokens(rows(ids), Reason.STOP)
    assert num_text == len(ids) - (not kept)
    assert options.num_text_tokens(rows(ids), Reason.LENGTH) == len(ids)
    expected = sample_text(tokenizer, ids[:num_text], options)
    stream = SampleStream(tokenizer, options)
    piece = stream.push(rows(ids), Reason.STOP)
    assert piece.text == expected.text
    assert len(piece.rows) == stream.num_tokens == len(ids)


def test_a_stop_string_before_the_end_token() -> None:
    tokenizer = small.byte_level()
    ids = tokenizer.encode("the answer is")
    options = TextOptions(stops=StopStrings(["the"]))
    assert sample_text(tokenizer, ids, options) == SampleText("", "the", len(tokenizer.encode("the")))
