from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.tokenizers import byte_fallback, byte_level, metaspace
from toka_async.openai.responses import CompletionLogprobs, TokenLogprob
from toka_async.server.engine.token_block import TokenRows
from toka_async.server.generate.logprobs import (
    ChatNames,
    TokenLengths,
    TokenNames,
    chat_logprobs,
    legacy_logprobs,
    prompt_logprobs,
    sample_offsets,
    text_offsets,
)
from toka_async.text.tokenizer import Tokenizer


def rows(ids: list[int], logprobs: list[float], top: list[list[int]], values: list[list[float]]) -> TokenRows:
    return TokenRows(
        np.array(ids, np.int32),
        np.array(logprobs, np.float32),
        np.array(top, np.int32).reshape(len(ids), -1),
        np.array(values, np.float32).reshape(len(ids), -1),
    )


def legacy(names: TokenNames, given: TokenRows, num_top: int) -> CompletionLogprobs:
    return legacy_logprobs(names, given.token_ids.tolist(), given.list_scores(), [0], num_top)


def of_chat(names: ChatNames, given: TokenRows, num_top: int) -> TokenLogprob:
    """Of the only token."""
    (entry,) = chat_logprobs(names, given.token_ids.tolist(), given.list_scores(), num_top).content or []
    return entry


def test_the_chosen_token_has_one_value() -> None:
    """Sums of floats differ by how they were computed; a client that asks whether the chosen was the top compares."""
    given = rows([5], [-0.25], [[5, 6]], [[-0.2500001, -2.0]])
    got = legacy(TokenNames(byte_level()), given, 2)
    assert got.top_logprobs == [{byte_level().token_text(5): -0.25, byte_level().token_text(6): -2.0}]
    entry = of_chat(ChatNames(byte_level()), given, 2)
    assert [top.logprob for top in entry.top_logprobs] == [entry.logprob, -2.0] == [-0.25, -2.0]


def test_fewer_than_the_engine_sent() -> None:
    tokenizer, given = byte_level(), rows([7], [-3.0], [[5, 6]], [[-0.5, -2.0]])
    got = legacy(TokenNames(tokenizer), given, 1)
    assert got.top_logprobs == [{tokenizer.token_text(5): -0.5, tokenizer.token_text(7): -3.0}]
    entry = of_chat(ChatNames(tokenizer), given, 1)
    assert [top.token for top in entry.top_logprobs] == [tokenizer.token_text(5)]
    (_, of_prompt) = prompt_logprobs(tokenizer, given, np.array([9], np.int32), 1)
    assert of_prompt is not None
    assert [(key, entry.rank) for key, entry in of_prompt.items()] == [("7", 9), ("5", 1)], "its own comes first"


def test_tokens_named_by_their_ids() -> None:
    given = rows([7], [-3.0], [[5, 6]], [[-0.5, -2.0]])
    got = legacy(TokenNames(byte_level(), as_ids=True), given, 2)
    assert got.tokens == ["token_id:7"]
    assert got.top_logprobs == [{"token_id:5": -0.5, "token_id:6": -2.0, "token_id:7": -3.0}]
    entry = of_chat(ChatNames(byte_level(), as_ids=True), given, 1)
    assert (entry.token, entry.top_logprobs[0].token) == ("token_id:7", "token_id:5")
    assert bytes(entry.bytes or []) == byte_level().token_bytes(7)


def test_the_likeliest_keeps_a_name_that_tokens_share() -> None:
    names = TokenNames(byte_level())
    names.update({3: "own", 4: "x", 5: "y", 6: "x"})
    got = legacy(names, rows([3], [-4.0], [[4, 5, 6]], [[-1.0, -2.0, -3.0]]), 3)
    assert got.top_logprobs == [{"x": -1.0, "y": -2.0, "own": -4.0}]
    assert got.top_logprobs[0] is not None
    assert [*got.top_logprobs[0]] == ["x", "y", "own"]
    names[3] = "x"
    assert legacy(names, rows([3], [-4.0], [[4, 5]], [[-1.0, -2.0]]), 2).top_logprobs == [{"x": -1.0, "y": -2.0}]


def test_minus_infinity_is_a_number() -> None:
    given = rows([5], [-np.inf], [[6, 7]], [[-1.0, -np.inf]])
    got = legacy(TokenNames(byte_level()), given, 2)
    assert got.token_logprobs == [-9999.0]
    assert got.top_logprobs[0] is not None
    assert [*got.top_logprobs[0].values()] == [-1.0, -9999.0, -9999.0]
    entry = of_chat(ChatNames(byte_level()), given, 2)
    assert [entry.logprob, *(top.logprob for top in entry.top_logprobs)] == [-9999.0, -1.0, -9999.0]


def test_parts_of_characters_keep_their_names() -> None:
    tokenizer = byte_level()
    parts = [
        i
        for i in range(tokenizer.vocab_size)
        if len(tokenizer.token_bytes(i)) == 1 and tokenizer.token_bytes(i) > b"\x7f"
    ]
    got = legacy(TokenNames(tokenizer), rows(parts[:1], [-1.0], [parts[:3]], [[-1.0, -2.0, -3.0]]), 3)
    assert got.tokens == [f"bytes:\\x{tokenizer.token_bytes(parts[0])[0]:02x}"]
    assert got.top_logprobs[0] is not None
    assert len(got.top_logprobs[0]) == 3
    entry = of_chat(ChatNames(tokenizer), rows(parts[:1], [-1.0], [[]], [[]]), 0)
    assert bytes(entry.bytes or []) == tokenizer.token_bytes(parts[0])


def test_offsets_are_places_in_the_text() -> None:
    tokenizer = byte_level()
    text = "the 👍🏽 end"
    ids = tokenizer.encode(text)
    offsets = text_offsets(tokenizer, ids, True, True, start=10)
    assert offsets[0] == 10
    assert offsets == sorted(offsets)
    whole = text_offsets(tokenizer, [*ids, 0], True, True)[-1]
    assert whole == len(text)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), build=st.sampled_from([byte_level, byte_fallback, metaspace]), skip=st.booleans())
def test_offsets_from_lengths_are_those_of_the_text(
    data: st.DataObject, build: Callable[[], Tokenizer], skip: bool
) -> None:
    tokenizer = build()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    expected = text_offsets(tokenizer, ids, skip, continues=True, start=5)
    assert sample_offsets(TokenLengths(tokenizer, skip), ids, 5) == expected
