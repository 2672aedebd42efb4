"""The made-up steps, computed with a model whose tokens tell what each row's pages hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.fakes.model import FakeAttention, FakeCache, FakeModel, logits_of
from toka_async.arrays import as_i32
from toka_async.attention.base import PrefixGroup
from toka_async.attention.build import BuiltAttention
from toka_async.bench.commands import SAMPLINGS
from toka_async.bench.step_load import Case, DecodeSteps, DoesNotFitError, PromptSteps, random_prompt
from toka_async.messages import Ready, TokenSampling
from toka_async.runner.runner import Runner

VOCAB = 50
GREEDY = TokenSampling(temperature=0.0)
READY = Ready(num_pages=64, page_size=4, max_seqs=8, max_context=40, vocab_size=VOCAB, max_tokens=12)


def make() -> tuple[Runner, FakeAttention]:
    cache, attention = FakeCache(READY.num_pages, READY.page_size), FakeAttention()
    model = FakeModel(VOCAB, cache)
    return Runner(READY, torch.device("cpu"), model, cache, BuiltAttention(attention)), attention


def continued(prompt: list[int], num_tokens: int) -> list[int]:
    """What the model says after a prompt."""
    tokens = [*prompt]
    for _ in range(num_tokens):
        tokens.append(int(logits_of(tokens, VOCAB).argmax()))
    return tokens[len(prompt) :]


def prompt_of(key: int, length: int) -> list[int]:
    prompt = random_prompt(key, length, np.empty(0, np.int32), READY, GREEDY)
    ids: list[int] = as_i32(prompt.token_ids).tolist()
    return ids


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=1, context=1),
        Case(rows=3, context=4),
        Case(rows=5, context=17),
        Case(rows=5, context=17, prefix=8, groups=2),
        Case(rows=8, context=13, prefix=12, groups=3),
        Case(rows=4, context=30, prefix=4, groups=4),
    ],
)
def test_rows_decode_after_their_groups_prompt(case: Case, grouped: bool) -> None:
    runner, attention = make()
    for _ in range(2):  # the second time over pages that are in use no more
        load = DecodeSteps(case, READY, GREEDY, 5, grouped)
        *_, first = [runner.run(step) for step in load.prepare()]
        sampled = np.stack(
            [as_i32(done.token_ids) for done in (first, runner.run(load.step()), runner.run(load.step()))]
        )
        assert attention.batch.context_lengths.tolist() == [case.context + 2] * case.rows
        groups = attention.batch.groups
        runner.run(load.end())
        num_groups = max(case.groups, 1)
        sizes = [case.rows // num_groups + (i < case.rows % num_groups) for i in range(num_groups)]
        group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
        for row, group in enumerate(group_of):
            assert sampled[:, row].tolist() == continued(prompt_of(group, case.context), 3)
        if grouped and case.prefix:
            starts = np.cumsum([0, *sizes[:-1]]).tolist()
            assert groups == tuple(PrefixGroup(*each, case.prefix // 4) for each in zip(starts, sizes, strict=True))
        else:
            assert groups == ()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", [Case(rows=5, context=17, prefix=8, groups=2), Case(rows=2, context=1)])
def test_rows_that_ask_for_more(case: Case, sampling: str) -> None:
    """The first ones do, with half of the context as output; the others draw what they draw alone."""
    runner, _ = make()
    expected = []
    for asking in (0, 2):
        load = DecodeSteps(dataclasses.replace(case, sampling=sampling, asking=asking), READY, GREEDY, 5, False)
        for step in load.prepare():
            done = runner.run(step)
        rows = runner._rows
        flags = rows.params["flags"][: case.rows]
        expected.append(as_i32(done.token_ids).tolist()[asking:])
        assert (flags[asking:] == 0).all()
        if asking:
            assert (flags[:asking] != 0).all() == (sampling != "plain")
            assert rows.num_prompt[:asking].tolist() == [case.context - case.context // 2] * asking
            assert bool(done.top_ids) == (sampling == "logprobs")
        runner.run(load.end())
        assert not runner._rows._known
    assert expected[0][2:] == expected[1]


@pytest.mark.parametrize("length", [1, 7, 12])
def test_each_prompt_is_another(length: int) -> None:
    runner, _ = make()
    load = PromptSteps(Case(prompt=length), READY, GREEDY)
    done = [runner.run(step) for step in (*load.prepare(), load.step(), load.step())]
    assert [as_i32(each.token_ids).tolist() for each in done] == [continued(prompt_of(i, length), 1) for i in (1, 2, 3)]
    assert not runner.run(load.end()).token_ids


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(rows=9, context=4), "schedule.max_seqs is 8"),
        (Case(rows=1, context=36), "model.max_context is 40"),
        (Case(rows=8, context=30), "288 tokens of cache, there are 256"),
    ],
)
def test_what_does_not_fit(case: Case, words: str) -> None:
    with pytest.raises(DoesNotFitError, match=words):
        DecodeSteps(case, READY, GREEDY, 6, grouped=False)


def test_a_prompt_that_does_not_fit() -> None:
    with pytest.raises(DoesNotFitError, match="at most 12 tokens"):
        PromptSteps(Case(prompt=13), READY, GREEDY)
