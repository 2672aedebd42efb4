"""Texts become the ids that the tokenizer gives them, a group at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from tests.cases.tokenizers import byte_fallback
from toka_async.server.generate import encoding
from toka_async.server.generate.encoding import TextEncoder, groups
from toka_async.text.tokenizer import Tokenizer
from toka_async.text.tokenizer_files import TokenizerError


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@given(lengths=st.lists(st.integers(0, 12), max_size=20))
def test_groups_hold_every_text_once_and_few_characters(lengths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "GROUP", 10)
        made = list(groups(lengths))
    assert [place for group in made for place in range(len(lengths))[group]] == list(range(len(lengths)))
    for group in made:
        assert len(lengths[group]) == 1 or (0 < len(lengths[group]) <= len(lengths) and sum(lengths[group]) <= 10)


async def test_many_texts_are_tokenized_a_group_at_a_time(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, sizes, encode = byte_fallback(), [], Tokenizer.encode_batch

    def counted(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        sizes.append(sum(map(len, texts)))
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    monkeypatch.setattr(encoding, "GROUP", 100)
    texts = [f"text {i} " * (1 + i % 7) for i in range(30)]
    encoder = TextEncoder(tokenizer, executor)
    with_special, without, none = await asyncio.gather(
        encoder.encode(texts, True), encoder.encode(texts, False), encoder.encode([], True)
    )
    assert max(sizes) <= 100 < sum(sizes)
    assert [each.tolist() for each in with_special] == encode(tokenizer, texts, True)
    assert [each.tolist() for each in without] == encode(tokenizer, texts, False)
    assert none == []


async def test_a_bad_text_is_its_callers_alone(executor: ThreadPoolExecutor) -> None:
    encoder = TextEncoder(byte_fallback(), executor)
    good, bad = await asyncio.gather(
        encoder.encode(["fine"], True), encoder.encode(["\ud800"], True), return_exceptions=True
    )
    assert isinstance(bad, TokenizerError)
    assert not isinstance(good, BaseException)


async def test_a_text_on_which_the_library_panics_is_its_callers_alone(executor: ThreadPoolExecutor) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"b": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a|a|aa)*$"), "isolated")  # exponential in the a's
    encoder = TextEncoder(Tokenizer(backend), executor)
    good, bad = await asyncio.gather(
        encoder.encode(["b"], True), encoder.encode(["a" * 40 + "!"], True), return_exceptions=True
    )
    assert isinstance(bad, TokenizerError)
    assert not isinstance(good, BaseException)
    assert [ids.tolist() for ids in await encoder.encode(["b"], True)] == [[0]]
