"""Whole steps with a real, tiny model, against transformers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.drivers.runners import Reference
from toka_async.arrays import as_f32, as_i32, column, i32_column
from toka_async.messages import ChunkLogprobs, Prompt, Step, StepDone, TokenSampling
from toka_async.runner import slab_sampler
from toka_async.runner.runner import Runner

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [1], [*range(40, 63)]]


def _pages(slot: int) -> list[int]:
    return [*range(slot * 10, slot * 10 + 10)]


def _admit(prompts: Sequence[list[int]], samplings: Sequence[TokenSampling], lengths: Sequence[int]) -> Step:
    """Row i has prompt i, ten pages of its own, and a first chunk of lengths[i] tokens."""
    slots = range(len(prompts))
    return Step(
        step_id=1,
        prompts=tuple(
            Prompt(key=i, token_ids=i32_column(ids), num_prompt=len(ids), pages=i32_column([]), sampling=samplings[i])
            for i, ids in enumerate(prompts)
        ),
        admit_slots=i32_column(slots),
        admit_keys=i32_column(slots),
        admit_starts=i32_column([0] * len(prompts)),
        admit_seeds=column(np.arange(len(prompts), dtype=np.int64)),
        page_slots=i32_column(slot for slot in slots for _ in range(10)),
        page_ids=i32_column(page for slot in slots for page in _pages(slot)),
        chunk_slots=i32_column(slots),
        chunk_lengths=i32_column(lengths),
        chunk_samples=column(np.array([n == len(ids) for n, ids in zip(lengths, prompts, strict=True)])),
    )


def _tops(done: StepDone) -> dict[int, list[tuple[int, float]]]:
    """The likeliest tokens of each row that has them."""
    counts = as_i32(done.top_counts)
    pairs = [*zip(as_i32(done.top_ids).tolist(), as_f32(done.top_logprobs).tolist(), strict=True)]
    ends = np.cumsum(counts)
    rows = as_i32(done.top_rows).tolist()
    return {row: pairs[end - count : end] for row, end, count in zip(rows, ends, counts, strict=True)}


def test_greedy_rows_of_mixed_lengths_equal_transformers(runner: Runner, reference: Reference) -> None:
    done = runner.run(_admit(PROMPTS, [TokenSampling(temperature=0)] * 3, [len(p) for p in PROMPTS]))
    texts = [[*prompt, token] for prompt, token in zip(PROMPTS, as_i32(done.token_ids).tolist(), strict=True)]
    for index in range(20):
        done = runner.run(Step(step_id=2, joined=i32_column(range(3) if index == 0 else [])))
        for text, token in zip(texts, as_i32(done.token_ids).tolist(), strict=True):
            text.append(token)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        greedy = reference(text).argmax(-1)[len(prompt) - 1 : -1]
        assert text[len(prompt) :] == greedy.tolist()


@pytest.mark.parametrize("slab_rows", [1, 2, 100])
def test_logprobs_are_of_the_raw_distribution(
    runner: Runner, reference: Reference, monkeypatch: pytest.MonkeyPatch, slab_rows: int
) -> None:
    """Rows with none, one, three and seven likeliest tokens; penalties and temperature change the draw only."""
    monkeypatch.setitem(slab_sampler.SLAB_BYTES, "cpu", slab_rows * 4 * runner.ready.vocab_size)
    prompts = [*PROMPTS, [3, 3, 3]]
    samplings = [
        TokenSampling(num_logprobs=3, temperature=0.3, repetition_penalty=2.0),
        TokenSampling(),
        TokenSampling(num_logprobs=7, top_p=0.5),
        TokenSampling(num_logprobs=0),
    ]
    done = runner.run(_admit(prompts, samplings, [len(p) for p in prompts]))
    tops = _tops(done)
    assert {row: len(top) for row, top in tops.items()} == {0: 3, 2: 7}
    tokens, logprobs = as_i32(done.token_ids).tolist(), as_f32(done.logprobs).tolist()
    assert logprobs[1] == 0
    for row in (0, 2, 3):
        expected = reference(prompts[row])[-1]
        assert logprobs[row] == pytest.approx(float(expected[tokens[row]]), abs=1e-4)
        best = expected.topk(len(tops.get(row, [])))
        assert [token for token, _ in tops.get(row, [])] == best.indices.tolist()
        assert [value for _, value in tops.get(row, [])] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_no_logprobs_when_no_row_asks(runner: Runner) -> None:
    done = runner.run(_admit(PROMPTS, [TokenSampling()] * 3, [len(p) for p in PROMPTS]))
    assert not any((done.logprobs, done.top_rows, done.top_counts, done.top_ids, done.top_logprobs, done.prompts))


def _chunk(slot: int, length: int, last: bool) -> Step:
    return Step(
        step_id=2,
        chunk_slots=i32_column([slot]),
        chunk_lengths=i32_column([length]),
        chunk_samples=column(np.array([last])),
    )


@pytest.mark.parametrize("slab_rows", [1, 3, 100])
def test_prompt_logprobs_of_chunks(
    runner: Runner, reference: Reference, monkeypatch: pytest.MonkeyPatch, slab_rows: int
) -> None:
    """Each chunk gives those of the prompt tokens that follow its own; the last prompt token has none after it."""
    monkeypatch.setitem(slab_sampler.SLAB_BYTES, "cpu", slab_rows * 4 * runner.ready.vocab_size)
    samplings = [
        TokenSampling(num_prompt_logprobs=0),
        TokenSampling(num_prompt_logprobs=2),
        TokenSampling(num_prompt_logprobs=4),
    ]
    first = runner.run(_admit(PROMPTS, samplings, [7, 1, 10]))
    steps = [first, runner.run(_chunk(2, 1, False)), runner.run(_chunk(2, 12, True))]
    messages = [(message.slot, message) for done in steps for message in done.prompts]
    assert [slot for slot, _ in messages] == [0, 2, 2, 2]
    for slot, num_top in ((0, 0), (2, 4)):
        _check_prompt(PROMPTS[slot], [m for s, m in messages if s == slot], num_top, reference)


def _check_prompt(prompt: list[int], messages: list[ChunkLogprobs], num_top: int, reference: Reference) -> None:
    expected = reference(prompt)[:-1]
    starts = np.cumsum([0, *(len(as_f32(m.logprobs)) for m in messages)])
    assert [m.start for m in messages] == starts[:-1].tolist()
    assert starts[-1] == len(prompt) - 1
    chosen = np.concatenate([as_f32(m.logprobs) for m in messages])
    np.testing.assert_allclose(chosen, expected.gather(1, torch.tensor(prompt)[1:, None])[:, 0], atol=1e-4)
    assert {m.num_top for m in messages} == {num_top}
    ranks = np.concatenate([as_i32(m.ranks) for m in messages])
    order = expected.argsort(dim=1, descending=True)
    np.testing.assert_array_equal(order.gather(1, torch.tensor(ranks)[:, None].long() - 1)[:, 0], prompt[1:])
    top_ids = np.concatenate([as_i32(m.top_ids) for m in messages]).reshape(len(prompt) - 1, num_top)
    tops = np.concatenate([as_f32(m.top_logprobs) for m in messages]).reshape(len(prompt) - 1, num_top)
    np.testing.assert_array_equal(top_ids, expected.topk(num_top).indices)
    np.testing.assert_allclose(tops, expected.topk(num_top).values, atol=1e-4)


def test_generated_tokens_of_a_resumed_row_are_not_its_prompt(runner: Runner, reference: Reference) -> None:
    """Of the ids only the first num_prompt get prompt log-probs."""
    ids = PROMPTS[2]
    step = _admit([ids], [TokenSampling(num_prompt_logprobs=0)], [len(ids)])
    (prompt,) = step.prompts
    resumed = Prompt(key=0, token_ids=prompt.token_ids, num_prompt=10, pages=prompt.pages, sampling=prompt.sampling)
    fields = {name: getattr(step, name) for name in step.__struct_fields__}
    (message,) = runner.run(Step(**fields | {"prompts": (resumed,)})).prompts
    expected = reference(ids)[:9].gather(1, torch.tensor(ids)[1:10, None])[:, 0]
    np.testing.assert_allclose(as_f32(message.logprobs), expected, atol=1e-4)


def test_a_step_of_events_only_samples_nothing(runner: Runner) -> None:
    done = runner.run(Step(step_id=9))
    assert done.step_id == 9
    assert not done.token_ids
    runner.run(_admit(PROMPTS, [TokenSampling()] * 3, [3, 1, 3]))
    done = runner.run(Step(step_id=10, freed=i32_column([0, 1, 2]), dropped_prompts=i32_column([0, 1, 2])))
    assert not done.token_ids
    assert done.seconds > 0


def test_chunks_that_do_not_sample_return_nothing(runner: Runner) -> None:
    done = runner.run(_admit([PROMPTS[2]], [TokenSampling()], [5]))
    assert not done.token_ids
    assert len(as_i32(runner.run(_chunk(0, 18, True)).token_ids)) == 1


def test_samples_of_one_prompt_differ_and_seeds_reproduce(runner: Runner) -> None:
    def run(seeds: list[int]) -> list[int]:
        prompts = [PROMPTS[0]] * len(seeds)
        step = _admit(prompts, [TokenSampling(temperature=2.0)] * len(seeds), [7] * len(seeds))
        fields = {name: getattr(step, name) for name in step.__struct_fields__}
        tokens: list[int] = as_i32(
            runner.run(Step(**fields | {"admit_seeds": column(np.array(seeds))})).token_ids
        ).tolist()
        slots = i32_column(range(len(seeds)))
        runner.run(Step(step_id=3, freed=slots, dropped_prompts=slots))
        return tokens

    first = run([1, 2, 3, 4, 5, 6])
    assert len(set(first)) > 3
    assert run([6, 3]) == [first[5], first[2]]


def test_a_row_without_enough_pages_is_a_bug(runner: Runner) -> None:
    step = _admit([[*range(200)]], [TokenSampling()], [51])
    with pytest.raises(AssertionError, match="pages"):
        runner.run(step)


@pytest.mark.parametrize(("name", "entered"), [("cpu", []), ("cuda:1", [torch.device("cuda:1")])])
def test_threads_work_with_the_runners_gpu(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, name: str, entered: list[torch.device]
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(runner, "device", torch.device(name))
    runner.enter_thread()
    assert devices == entered
