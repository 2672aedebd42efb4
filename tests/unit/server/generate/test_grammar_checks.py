from __future__ import annotations

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


async def test_a_good_grammar_is_compiled_once(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, check = [], GrammarVocabulary.check

    def count(self: GrammarVocabulary, grammar: str) -> None:
        compiled.append(grammar)
        check(self, grammar)

    monkeypatch.setattr(GrammarVocabulary, "check", count)
    request = ask(regex="a+")
    assert not checks.knows(request.sampling.grammar)
    for _ in range(3):
        await checks.check(request, NUM_TOKENS)
    assert checks.knows(request.sampling.grammar)
    assert compiled == [request.sampling.grammar]


async def test_a_bad_grammar_is_refused_each_time_with_its_field(checks: GrammarChecks) -> None:
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await checks.check(ask(guided_json={"type": "array", "uniqueItems": True}), NUM_TOKENS)
        assert (caught.value.status, caught.value.param) == (400, "guided_json")
        assert "uniqueItems" in caught.value.message


async def test_requests_without_a_grammar_need_nothing(checks: GrammarChecks) -> None:
    await checks.check(ask(), NUM_TOKENS)
    assert checks.knows("")
    assert checks._vocabulary is None


async def test_old_checks_are_forgotten(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MOST_KNOWN", 2)
    requests = [ask(regex=text) for text in "abc"]
    for request in requests:
        await checks.check(request, NUM_TOKENS)
    assert [checks.knows(request.sampling.grammar) for request in requests] == [False, True, True]
