"""Sampling by kernels against sampling by torch, over the same rows: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.drivers.sampler_bench import PROMPT, READY, VOCAB, Bench, list_likeliest
from tests.fakes.plain_kernels import PlainKernels
from toka_async.arrays import f32_column, i32_column
from toka_async.kernels.sampling.kernels import SamplingKernels
from toka_async.messages import LogprobKind, Prompt, TokenSampling
from toka_async.runner import kernel_sampler
from toka_async.runner.rows import read_prompt
from toka_async.runner.samples import Draws
from toka_async.runner.sampling_routes import Route

GREEDY = TokenSampling(temperature=0)
FAST = {
    "greedy": (GREEDY, TokenSampling(top_k=1)),
    "temperature": (TokenSampling(), TokenSampling(temperature=0.4)),
    "filters": (TokenSampling(top_k=7), TokenSampling(temperature=0.8, top_p=0.6, top_k=64)),
    "nucleus": (TokenSampling(temperature=0.3, top_p=0.7, min_p=0.01),),
    "repetition": (TokenSampling(temperature=0, repetition_penalty=3.0), TokenSampling(repetition_penalty=0.7)),
    "extremes": (TokenSampling(temperature=1e-5, top_p=1e-46), TokenSampling(repetition_penalty=0.01)),
    "log-probs": (TokenSampling(num_logprobs=0, temperature=0.5), GREEDY),
    "temperature's log-probs": (
        TokenSampling(num_logprobs=0, temperature=0.5, top_p=0.6, logprob_kind=LogprobKind.TEMPERATURE),
        TokenSampling(num_logprobs=0, temperature=0, repetition_penalty=2, logprob_kind=LogprobKind.TEMPERATURE),
        TokenSampling(num_logprobs=0, temperature=0.7, logprob_kind=LogprobKind.PROCESSED),  # without filters the same
    ),
}
FULL = {
    "bias": TokenSampling(bias_ids=i32_column([5, VOCAB + 1]), bias_values=f32_column([50.0, 1.0])),
    "min_tokens": TokenSampling(temperature=0, min_tokens=9, end_ids=i32_column(range(60))),
    "counts": TokenSampling(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0),
    "likeliest": TokenSampling(num_logprobs=4, temperature=0.7),
    "likeliest at a temperature": TokenSampling(
        num_logprobs=4, temperature=0.7, repetition_penalty=2, logprob_kind=LogprobKind.TEMPERATURE
    ),
    "kept": TokenSampling(num_logprobs=0, temperature=0.8, top_k=7, top_p=0.9, logprob_kind=LogprobKind.PROCESSED),
    "kept and likeliest": TokenSampling(
        num_logprobs=20,
        temperature=0.9,
        top_k=6,
        frequency_penalty=0.7,
        repetition_penalty=0.8,
        bias_ids=i32_column([3, 70]),
        bias_values=f32_column([2.0, -1.0]),
        logprob_kind=LogprobKind.PROCESSED,
    ),
    "all": TokenSampling(
        num_logprobs=20,
        temperature=0.9,
        top_p=0.9,
        frequency_penalty=0.7,
        repetition_penalty=0.8,
        min_tokens=2,
        end_ids=i32_column(range(0, VOCAB, 3)),
        bias_ids=i32_column([3, 70, 8, 8]),
        bias_values=f32_column([2.0, -1.0, 2.0, 1.5]),
    ),
}
TORCH = {
    "allowed": TokenSampling(allowed_ids=i32_column([4, 44, 7, VOCAB + 1])),
    "many likeliest": TokenSampling(num_logprobs=21, presence_penalty=1.0),
    "many kept": TokenSampling(num_logprobs=30, top_p=0.9, logprob_kind=LogprobKind.PROCESSED),
    "long list": TokenSampling(
        min_tokens=3, end_ids=i32_column(range(VOCAB)), bias_ids=i32_column(range(VOCAB)),
        bias_values=f32_column([0.1] * VOCAB), num_logprobs=3,
    ),
}  # fmt: skip


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":  # the interpreter is slow: little of a line is there to be read
        monkeypatch.setattr(kernel_sampler, "SamplingKernels", partial(SamplingKernels, chunk=64))
    return Bench(device)


def check_equal(pair: tuple[Draws, Draws]) -> None:
    by_kernels, by_torch = pair
    assert by_kernels.token_ids.tolist() == by_torch.token_ids.tolist()
    assert (by_kernels.chosen is None) == (by_torch.chosen is None)
    if by_kernels.chosen is not None and by_torch.chosen is not None:
        torch.testing.assert_close(by_kernels.chosen, by_torch.chosen, atol=1e-5, rtol=1e-5)
    for name in ("kept", "masses"):
        own, other = getattr(by_kernels, name), getattr(by_torch, name)
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    tops, expected = list_likeliest(by_kernels), list_likeliest(by_torch)
    assert tops.keys() == expected.keys()
    for row, top in tops.items():
        assert [token_id for token_id, _ in top] == [token_id for token_id, _ in expected[row]]
        assert [value for _, value in top] == pytest.approx([value for _, value in expected[row]], abs=1e-5)


def route_of(bench: Bench, *slots: int) -> Route:
    return bench.kernels.find_needs(np.array(slots, dtype=np.int32)).route


@pytest.mark.parametrize("kind", FAST)
def test_plain_rows_draw_what_torch_draws(bench: Bench, kind: str) -> None:
    samplings = dict(enumerate(FAST[kind]))
    bench.admit(samplings)
    slots = [*samplings][::-1]
    assert route_of(bench, *slots) is Route.PLAIN
    check_equal(bench.sample(slots))
    check_equal(bench.sample(slots[:1]))  # the next of its stream


@pytest.mark.parametrize("kind", [*FULL, *TORCH])
def test_other_rows_draw_what_torch_draws(bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Alone, and between plain rows."""
    if kind == "long list":
        monkeypatch.setattr(kernel_sampler, "LIST_WIDTH", 2 * VOCAB - 1)
    bench.admit({6: (FULL | TORCH)[kind], 2: GREEDY, 0: TokenSampling(num_logprobs=0)})
    route = Route.FULL if kind in FULL else Route.TORCH
    assert [route_of(bench, 6), route_of(bench, 2, 6), route_of(bench, 0, 2)] == [route, route, Route.PLAIN]
    check_equal(bench.sample([6]))
    check_equal(bench.sample([2, 6]))
    check_equal(bench.sample([0, 6]))


GRAMMAR: dict[str, Any] = {"grammar": "start: /.*/"}  # that a row has one; the masks are of the test
MASKED = {
    0: TokenSampling(num_logprobs=0, **GRAMMAR),
    1: TokenSampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, num_logprobs=3, **GRAMMAR),
    2: TokenSampling(top_k=3, num_logprobs=2, logprob_kind=LogprobKind.PROCESSED, **GRAMMAR),
    3: TokenSampling(num_logprobs=30, **GRAMMAR),  # in plain torch
    4: GREEDY,
    5: FULL["all"],
}


def test_rows_with_masks_draw_what_torch_draws(bench: Bench) -> None:
    """Beside rows without one, whose slots' masks allow nothing."""
    bench.admit(MASKED)
    allowed = np.zeros((READY.max_seqs + 1, 96), dtype=np.bool_)
    allowed[:4, :VOCAB] = np.random.default_rng(0).random((4, VOCAB)) < 0.2
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    bench.rows.masks = torch.from_numpy(bits).to(bench.device)
    assert [route_of(bench, slot) for slot in range(4)] == [*[Route.FULL] * 3, Route.TORCH]
    for slots in ([0, 1, 2, 5], [4, 3, 2, 1, 0], [5, 0, 4], [1, 2]):
        pair = bench.sample(slots)
        check_equal(pair)
        tokens = pair[0].token_ids.tolist()
        assert all(slot > 3 or allowed[slot, token] for slot, token in zip(slots, tokens, strict=True))


def test_rows_of_all_routes_together(bench: Bench) -> None:
    """Again and again, so that outputs grow."""
    bench.admit({0: GREEDY, 1: FULL["all"], 2: FULL["counts"], 3: TORCH["many likeliest"], 4: TORCH["allowed"]})
    for slots in ([3, 0, 1, 2], [4, 1], [2, 3, 1, 0, 4], [1, 2], [2, 1, 4]):
        check_equal(bench.sample(slots))


def test_likeliest_tokens_of_several_rows_between_others(bench: Bench) -> None:
    bench.admit({0: GREEDY, 1: FULL["likeliest"], 2: FULL["counts"], 3: TokenSampling(num_logprobs=2)})
    pair = bench.sample([3, 0, 1, 2])
    check_equal(pair)
    assert {row: len(top) for row, top in list_likeliest(pair[0]).items()} == {0: 2, 2: 4}


def test_log_probs_and_likeliest_tokens_are_raw(bench: Bench) -> None:
    """The bias makes a token certain that is otherwise not likely."""
    sampling = TokenSampling(bias_ids=i32_column([5]), bias_values=f32_column([100.0]), num_logprobs=2)
    bench.admit({1: sampling})
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 9]] = torch.tensor([3.0, 2.0])
    by_kernels, _ = pair = bench.sample([1], logits)
    check_equal(pair)
    assert int(by_kernels.token_ids) == 5
    assert [token_id for token_id, _ in list_likeliest(by_kernels)[0]] == [7, 9]
    assert by_kernels.chosen is not None
    assert float(by_kernels.chosen) == pytest.approx(float(logits.log_softmax(-1)[0, 5]), abs=1e-5)


def test_a_large_top_k_is_for_kernels_too(bench: Bench) -> None:
    """Such a row may draw another token than torch, out of those that it keeps."""
    bench.admit({4: TokenSampling(temperature=0, top_k=80), 5: TokenSampling(temperature=9.0, top_k=80)})
    assert route_of(bench, 4, 5) is Route.PLAIN
    logits = torch.arange(VOCAB).repeat(2, 1) / VOCAB
    by_kernels, by_torch = bench.sample([4, 5], logits)
    assert int(by_kernels.token_ids[0]) == int(by_torch.token_ids[0]) == VOCAB - 1
    assert VOCAB - 80 <= int(by_kernels.token_ids[1]) < VOCAB


PENALISED = TokenSampling(temperature=0, repetition_penalty=1.5)


def test_ids_of_the_prompt_are_seen_by_rows_that_penalise(bench: Bench) -> None:
    bench.admit({1: PENALISED, 2: GREEDY, 3: PENALISED, 0: FULL["counts"]})
    assert [bench.seen(slot) for slot in range(4)] == [set(PROMPT), set(PROMPT), set(), set(PROMPT)]


def test_drawn_ids_are_seen(bench: Bench) -> None:
    bench.admit({1: PENALISED, 2: PENALISED})
    logits = torch.zeros(1, VOCAB)
    logits[0, [31, 32, 70, 64]] = torch.tensor([9.0, 8.0, 7.5, 7.0])  # 70 is in the prompt
    drawn = [int(bench.sample([1], logits)[0].token_ids) for _ in range(3)]
    assert drawn == [31, 32, 64]
    assert bench.seen(1) == {*PROMPT, *drawn}
    assert bench.seen(2) == {*PROMPT}


def test_a_slot_used_again_has_seen_its_new_prompt_only(bench: Bench) -> None:
    bench.admit({1: PENALISED})
    bench.sample([1])
    bench.admit({1: PENALISED}, tokens=[8, 88])
    assert bench.seen(1) == {8, 88}
    check_equal(bench.sample([1]))
    bench.admit({1: FULL["bias"]})
    check_equal(bench.sample([1]))
    bench.admit({1: TokenSampling(top_k=3)})
    check_equal(bench.sample([1]))


def test_a_row_goes_on_after_a_preemption(bench: Bench) -> None:
    """Its tokens come back as a prompt: it has seen all of them, and goes on with its random stream."""
    sampling = TokenSampling(temperature=1.2, repetition_penalty=1.3)
    bench.admit({1: sampling})
    drawn = [int(bench.sample([1])[0].token_ids) for _ in range(3)]
    bench.admit({1: sampling}, tokens=[*PROMPT, *drawn[:2]], num_prompt=len(PROMPT))
    assert bench.seen(1) == {*PROMPT, *drawn[:2]}
    by_kernels, by_torch = bench.sample([1])
    assert int(by_kernels.token_ids) == int(by_torch.token_ids) == drawn[2]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 90])
def test_seen_bits_are_those_of_the_ids(vocab: int) -> None:
    prompt = Prompt(key=0, token_ids=i32_column([0, vocab - 1, 0]), num_prompt=3, pages=i32_column([]), sampling=GREEDY)
    bits = kernel_sampler._make_seen_bits(read_prompt(prompt, vocab), vocab)
    assert bits.shape == (-(-vocab // 32),)
    assert {i for i in range(32 * bits.size) if int(bits[i // 32]) >> i % 32 & 1} == {0, vocab - 1}


@pytest.mark.usefixtures("plain_kernels")
def test_kernels_are_compiled_for_logits_of_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[torch.Size, torch.dtype]] = []
    draw = PlainKernels.draw

    def note(self: PlainKernels, logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        drawn.append((logits.shape, logits.dtype))
        return draw(self, logits, *others)

    monkeypatch.setattr(PlainKernels, "draw", note)
    kernel_sampler.try_sampling(50, torch.bfloat16, torch.device("cpu"))
    assert drawn == [(torch.Size([1, 50]), torch.bfloat16)]
