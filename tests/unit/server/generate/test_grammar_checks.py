from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cases.grammars import END_IDS, NUM_TOKENS, load_tokenizer
from toka_async.grammars.vocabulary import GrammarVocabulary
from toka_async.openai.errors import ApiError
from toka_async.openai.generation import Defaults, GenerationParams, RequestLimits, completion_generation
from toka_async.openai.parse import parse_fields
from toka_async.openai.requests import CompletionRequest
from toka_async.server.generate import grammar_checks
from toka_async.server.generate.grammar_checks import GrammarChecks

LIMITS = RequestLimits(max_context=100, cache_tokens=100, vocab_size=NUM_TOKENS, max_n=4)


def ask(**fields: Any) -> GenerationParams:
    return completion_generation(parse_fields({"prompt": "x", **fields}, CompletionRequest), LIMITS, Defaults())


@pytest.fixture
def checks() -> GrammarChecks:
    return GrammarChecks(load_tokenizer(), END_IDS)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled."""
    grammars, check = list[str](), GrammarVocabulary.check

    def count(self: GrammarVocabulary, grammar: str) -> None:
        grammars.append(grammar)
        check(self, grammar)

    monkeypatch.setattr(GrammarVocabulary, "check", count)
    return grammars


async def test_a_good_grammar_is_compiled_once(checks: GrammarChecks, compiled: list[str]) -> None:
    request = ask(regex="a+")
    checks.refuse_known(request)
    assert not checks.knows(request.sampling.grammar)
    for _ in range(3):
        await checks.check(request, NUM_TOKENS)
    assert checks.knows(request.sampling.grammar)
    assert compiled == [request.sampling.grammar]


async def test_requests_that_come_during_a_check_wait_for_the_same(checks: GrammarChecks, compiled: list[str]) -> None:
    request = ask(regex="a(")
    waiting = [asyncio.create_task(checks.check(request, NUM_TOKENS)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in outcomes] == [asyncio.CancelledError, ApiError, ApiError]
    assert compiled == [request.sampling.grammar]
    with pytest.raises(ApiError):
        checks.refuse_known(request)


async def test_a_bad_grammar_is_refused_each_time_with_its_field(checks: GrammarChecks) -> None:
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await checks.check(ask(guided_json={"type": "array", "uniqueItems": True}), NUM_TOKENS)
        assert (caught.value.status, caught.value.param) == (400, "guided_json")
        assert "uniqueItems" in caught.value.message
    assert not checks.knows(ask(guided_json={"type": "array", "uniqueItems": True}).sampling.grammar)


async def test_a_check_that_breaks_is_tried_again(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(GrammarVocabulary, "check", fail)
        with pytest.raises(OSError, match="broken"):
            await checks.check(ask(regex="a"), NUM_TOKENS)
    await checks.check(ask(regex="a"), NUM_TOKENS)


async def test_requests_without_a_grammar_need_nothing(checks: GrammarChecks) -> None:
    await checks.check(ask(), NUM_TOKENS)
    assert checks.knows("")
    assert checks._vocabulary is None


async def test_old_checks_are_forgotten(
    checks: GrammarChecks, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "MOST_KNOWN", 2)
    for text in "abcbca":
        await checks.check(ask(regex=text), NUM_TOKENS)
    assert compiled == [ask(regex=text).sampling.grammar for text in "abca"]


async def test_a_costly_grammar_is_compiled_under_limits_alone(checks: GrammarChecks, compiled: list[str]) -> None:
    cheap, costly = ask(regex="a+"), ask(guided_json={"type": "integer", "multipleOf": 1021})
    await checks.check_costly(cheap, NUM_TOKENS)
    assert not checks.knows(cheap.sampling.grammar)
    await checks.check_costly(costly, NUM_TOKENS)
    assert checks.knows(costly.sampling.grammar)
    await checks.check(costly, NUM_TOKENS)
    assert compiled == []
    checks.close()


async def test_a_costly_grammar_that_is_no_good_is_refused_with_its_field(checks: GrammarChecks) -> None:
    costly = ask(guided_json={"type": "integer", "multipleOf": 1021, "uniqueItems": 5})
    with pytest.raises(ApiError) as caught:
        await checks.check_costly(costly, NUM_TOKENS)
    assert (caught.value.status, caught.value.param) == (400, "guided_json")
    checks.close()
