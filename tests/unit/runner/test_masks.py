"""Rows with a grammar in a real engine on one device: what they draw, and that nothing else about them changes."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from tests.cases.grammars import DEMO, END_IDS, ORDER, load_tokenizer, make_vocabulary, order_grammar
from tests.drivers.core import Received
from tests.drivers.engine import Engine
from toka_async.arrays import i32_column
from toka_async.grammars.matchers import RowMatchers
from toka_async.messages import Reason, TokenSampling
from toka_async.model.penalties import apply_masks
from toka_async.runner.slab_sampler import SlabSampler

ENDS = i32_column(END_IDS)
PROMPT = load_tokenizer().encode("Question: Sam has 4 boxes.\nAnswer:")


def sample_by(grammar: str, **fields: Any) -> TokenSampling:
    values: dict[str, Any] = {"end_ids": ENDS, "temperature": 1.0, "grammar": grammar} | fields
    return TokenSampling(**values)


def make_engine(**options: Any) -> Engine:
    return Engine(DEMO, vocabulary=make_vocabulary(), **options)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def read_texts(received: Received) -> list[str]:
    return [load_tokenizer().decode(sample.token_ids) for sample in received.samples]


def check_orders(received: Received) -> None:
    for sample, text in zip(received.samples, read_texts(received), strict=True):
        assert sample.reason is Reason.STOP
        jsonschema.validate(json.loads(text), ORDER)


def test_every_sample_matches_its_grammar_beside_rows_without_one(engine: Engine) -> None:
    ordered, plain, chosen = (
        engine.driver.submit(each)
        for each in (
            make_submit(1, sample_by(order_grammar()), n=6),
            make_submit(2, TokenSampling(end_ids=ENDS, temperature=1.0), n=3),
            make_submit(3, sample_by('start: "yes" | "no"'), n=4),
        )
    )
    engine.driver.drain()
    check_orders(ordered)
    assert set(read_texts(chosen)) <= {"yes", "no"}
    alone = engine.driver.submit(make_submit(4, TokenSampling(end_ids=ENDS, temperature=1.0), n=3, seed=2))
    engine.driver.drain()
    assert [sample.token_ids for sample in plain.samples] == [sample.token_ids for sample in alone.samples]


def make_submit(request_id: int, sampling: TokenSampling, **fields: Any) -> Any:
    from tests.drivers.page_rank import submit

    return submit(request_id + 1000, PROMPT, **{"sampling": sampling, "max_tokens": 120, "seed": request_id} | fields)


def test_a_preempted_row_goes_on_in_its_grammar() -> None:
    def run(**options: Any) -> tuple[list[list[int]], int]:
        engine = make_engine(page_size=8, max_seqs=8, **options)
        received = engine.driver.submit(make_submit(7, sample_by(order_grammar()), n=8))
        engine.driver.drain()
        check_orders(received)
        return [sample.token_ids for sample in received.samples], engine.driver.stats.num_preemptions

    roomy, none = run(num_tokens=8192)
    tight, some = run(num_tokens=320, until_full=True)
    assert none == 0
    assert some > 0
    assert tight == roomy


def test_penalties_filters_and_seeds_act_within_the_grammar(engine: Engine) -> None:
    fields = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "top_p": 0.9, "top_k": 20, "temperature": 0.8}
    first, second = (
        engine.driver.submit(make_submit(number, sample_by(order_grammar(), **fields), n=3, seed=5))
        for number in (20, 21)
    )
    engine.driver.drain()
    check_orders(first)
    assert [s.token_ids for s in first.samples] == [s.token_ids for s in second.samples]


def test_logprobs_are_of_the_model_without_the_grammar(engine: Engine) -> None:
    (free,) = engine.run([PROMPT], sampling=TokenSampling(temperature=0.0, num_logprobs=0), max_tokens=1)
    (token,), (logprob,) = free.samples[0].token_ids, free.samples[0].logprobs
    grammar = f"start: {json.dumps(load_tokenizer().token_text(token))} /(.|\\n)*/"
    (bound,) = engine.run([PROMPT], sampling=sample_by(grammar, temperature=0.0, num_logprobs=0), max_tokens=1)
    assert bound.samples[0].logprobs[0] == pytest.approx(logprob, abs=1e-5)


def test_min_tokens_holds_the_end_until_the_grammar_is_complete(engine: Engine) -> None:
    (long,) = engine.run([PROMPT], sampling=sample_by("start: /a{1,9}/", min_tokens=4), max_tokens=20)
    assert len(read_texts(long)[0]) >= 4
    (short,) = engine.run([PROMPT], sampling=sample_by('start: "ab"', min_tokens=9), max_tokens=20)
    assert read_texts(short) == ["ab"]


def test_a_grammar_that_fails_ends_its_samples_alone(engine: Engine) -> None:
    hungry = "start: " + " ".join(["item?"] * 2500) + "\nitem: " + " | ".join(f'"{n}"' for n in range(10))
    bad, other, streamed = (
        engine.driver.submit(each)
        for each in (
            make_submit(30, sample_by(hungry), n=2),
            make_submit(31, sample_by('start: "yes"'), n=2),
            make_submit(32, sample_by("start: ("), stream=True),
        )
    )
    engine.driver.drain()
    for sample in [*bad.samples, *streamed.samples]:
        assert (sample.reason, sample.token_ids) == (Reason.ERROR, [])
    assert read_texts(other) == ["yes", "yes"]


def test_masks_are_made_after_the_forward_pass_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    calls: list[str] = []

    def note(owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(method)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, method, noted)

    for owner, method in ((engine.runner.model, "finish"), (RowMatchers, "fill_parts"), (SlabSampler, "_sample_slab")):
        note(owner, method)
    engine.run([PROMPT], sampling=sample_by('start: "yes"'), max_tokens=9)
    assert len(calls) >= 6
    assert calls == ["finish", "fill_parts", "_sample_slab"] * (len(calls) // 3)


class Stream:
    """calls: gets what the stream waited for."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def wait_stream(self, stream: Stream) -> None:
        self.calls.append(f"{self.name} waits for {stream.name}")


def test_the_stream_that_copies_masks_waits_for_draws_as_these_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or new masks could be there before the draw by the old ones: a slot's next row does not wait for its tokens."""
    engine = make_engine()
    calls: list[str] = []
    copies, computing = Stream("copies", calls), Stream("computing", calls)
    draw, masks = SlabSampler._sample_slab, engine.runner._masks
    assert masks is not None
    monkeypatch.setattr(masks, "_copies", copies)
    monkeypatch.setattr("toka_async.runner.masks.FEW", 0)
    monkeypatch.setattr("toka_async.runner.masks.mark", time.perf_counter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def noted(*args: Any) -> Any:
        calls.append("draw")
        return draw(*args)

    monkeypatch.setattr(SlabSampler, "_sample_slab", noted)
    engine.run([PROMPT], sampling=sample_by('start: "yes"'), max_tokens=9)
    assert len(calls) >= 6
    assert calls == ["computing waits for copies", "draw", "copies waits for computing"] * (len(calls) // 3)


def test_steps_without_grammars_make_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def refuse(*_: object) -> None:
        raise AssertionError("work for a row without a grammar")

    for name in ("find", "take", "fill", "advance", "admit"):
        monkeypatch.setattr(RowMatchers, name, refuse)
    engine.run([PROMPT] * 3, max_tokens=5)


def test_words_of_masks_are_of_the_lowest_ids_first() -> None:
    rng = np.random.default_rng(0)
    allowed = rng.random((3, 70)) < 0.4
    packed = np.zeros((3, 96), np.bool_)
    packed[:, :70] = allowed
    masks = torch.from_numpy(np.packbits(packed, axis=1, bitorder="little").view(np.int32))
    logits = torch.zeros(5, 70)
    apply_masks(logits, torch.tensor([4, 0, 2]), masks)
    assert (logits[[4, 0, 2]].numpy() == 0).tolist() == allowed.tolist()
    assert not logits[[1, 3]].any()
