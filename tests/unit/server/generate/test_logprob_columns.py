"""Log-probs of many samples as JSON, against what is made of each alone."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import tokenizers as small
from toka_async.openai.responses import CompletionLogprobs
from toka_async.server.engine.rows import TokenBlock, TokenRows
from toka_async.server.generate.logprob_columns import WIDTH, LogprobColumns
from toka_async.server.generate.logprobs import TokenNames, legacy_logprobs, text_offsets
from toka_async.text.tokenizer import Tokenizer

BUILDERS = (small.byte_level, small.byte_fallback, small.metaspace)


def tokens(ids: list[int], logprobs: list[float]) -> TokenRows:
    none = np.empty(0, np.int32)
    return TokenBlock(none, none, np.array(ids, np.int32), none, np.array(logprobs, np.float32)).tokens


@settings(max_examples=60, deadline=None)
@given(data=st.data(), build=st.sampled_from(BUILDERS), skip=st.booleans(), start=st.integers(0, 20000))
def test_many_are_as_each(data: st.DataObject, build: Callable[[], Tokenizer], skip: bool, start: int) -> None:
    tokenizer = build()
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12)
    samples = []
    for row in data.draw(st.lists(ids, min_size=1, max_size=4)):
        values = st.floats(-100, 0, width=32) | st.just(-np.inf)
        samples.append(tokens(row, data.draw(st.lists(values, min_size=len(row), max_size=len(row)))))
    for rows, raw in zip(samples, LogprobColumns(tokenizer).encode(samples, skip, start), strict=True):
        offsets = text_offsets(tokenizer, rows.token_ids.tolist(), skip, True, start)
        expected = legacy_logprobs(TokenNames(tokenizer), rows, offsets, 0)
        found = msgspec.json.decode(raw, type=CompletionLogprobs)
        assert (found.tokens, found.text_offset) == (expected.tokens, expected.text_offset)
        assert found.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-7, rel=1e-7)
        for one, other in zip(found.top_logprobs, expected.top_logprobs, strict=True):
            assert one is not None
            assert other is not None
            assert list(one) == list(other)
            assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-7, rel=1e-7)
        assert [list((top or {}).values()) for top in found.top_logprobs] == [[each] for each in found.token_logprobs]


def test_a_name_that_is_longer_than_the_table() -> None:
    backend = tokenizers.Tokenizer.from_str(small.byte_level().backend.to_str())
    text = "x" * (2 * WIDTH)
    backend.add_tokens([text])
    longer = Tokenizer(backend)
    last = longer.vocab_size - 1
    assert longer.token_text(last) == text
    (raw,) = LogprobColumns(longer).encode([tokens([last, 70, last], [-1, -2, -3])], True, 0)
    found = msgspec.json.decode(raw, type=CompletionLogprobs)
    assert found.tokens == [text, longer.token_text(70), text]
    assert found.top_logprobs[2] == {text: -3.0}
    assert found.text_offset == [0, 2 * WIDTH, 2 * WIDTH + 1]
