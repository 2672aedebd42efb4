"""With `model.batch_invariant` a request's tokens and log-probs are the same bits, whatever runs beside it.

Requests arrive at random times, in steps of few tokens and of many, with caches that hold what came before, and with
caches so small that sequences are preempted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cases.invariance import AskedRequest, answer_alone, list_answers, make_requests
from tests.cases.models import make_checkpoint
from tests.drivers.engine import Engine
from tests.drivers.paged_rows import PagedRow, run_rows
from tests.parity.test_engine import SHAPES
from toka_async.attention.kv_cache import make_cache
from toka_async.checkpoint.spec import read_spec
from toka_async.model.weights import build_decoder, load_weights

MODELS = {
    "qwen3-biased": "float32",
    "mistral-window": "float32",
    "llama-7-heads-linear": "bfloat16",
    "qwen2-derived-head": "bfloat16",
    "qwen3_moe-mixed-layers": "bfloat16",
    "gpt_oss-window": "float32",
}
OFTEN = ("mistral-window", "qwen3_moe-mixed-layers")  # the others are slow
REQUESTS = make_requests(12, longest=60, max_tokens=20)


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass(slots=True)
class Model:
    """A model, and the answers to REQUESTS, each computed alone in large steps and without the prefix cache."""

    folder: Path
    dtype: str
    alone: list[list[object]]

    def start(self, batch_invariant: bool = True, **options: int | bool) -> Engine:
        shape = {"page_size": 5, "dtype": self.dtype, "batch_invariant": batch_invariant}
        return Engine(self.folder, **(shape | options))  # type: ignore[arg-type]


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=() if each in OFTEN else pytest.mark.slow) for each in MODELS]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name = request.param
    folder = make_checkpoint(tmp_path_factory.mktemp(name), name.partition("-")[0], seed=1, **SHAPES[name])
    made = Model(folder, MODELS[name], [])
    engine = made.start(max_tokens=256, prefix=False)
    made.alone = [answer_alone(engine, asked) for asked in REQUESTS]
    return made


def run_together(engine: Engine, arrivals: list[tuple[int, int]]) -> list[tuple[int, list[object]]]:
    """Submits requests, each so many steps after the one before it. Returns index and answers of each."""
    received = []
    for index, wait in arrivals:
        for _ in range(wait):
            engine.driver.turn()
        received.append((index, REQUESTS[index].submit_to(engine)))
    engine.driver.drain()
    return [(index, list_answers(each)) for index, each in received]


ARRIVALS = st.lists(st.tuples(st.integers(0, len(REQUESTS) - 1), st.integers(0, 6)), min_size=1, max_size=14)


@settings(max_examples=8, deadline=None)
@given(arrivals=ARRIVALS, max_tokens=st.sampled_from([16, 23, 300]), num_tokens=st.sampled_from([220, 4000]))
def test_a_request_is_answered_as_if_it_were_alone(
    model: Model, arrivals: list[tuple[int, int]], max_tokens: int, num_tokens: int
) -> None:
    engine = model.start(max_tokens=max_tokens, num_tokens=num_tokens, until_full=num_tokens < 1000)
    for index, answers in run_together(engine, arrivals):
        assert answers == model.alone[index]


def test_sequences_are_preempted_and_prefixes_found(model: Model) -> None:
    """What the property is about happens: otherwise it would show nothing."""
    everything = [(index, 1) for index in range(len(REQUESTS))]
    engine = model.start(max_tokens=16, num_tokens=220, until_full=True)
    for index, answers in run_together(engine, everything):
        assert answers == model.alone[index]
    assert engine.driver.stats.num_preemptions > 0
    engine = model.start(max_tokens=300)
    for index, answers in run_together(engine, everything * 2):
        assert answers == model.alone[index]
    found = [received.prefilled.cached_tokens for received in engine.driver.received.values() if received.prefilled]
    assert sum(found) > 100


def test_otherwise_the_batch_decides(model: Model) -> None:
    """Products are summed as is fastest for their number of rows: so there is something to show."""
    engine = model.start(batch_invariant=False, max_tokens=256, prefix=False)
    alone = [answer_alone(engine, asked) for asked in REQUESTS]
    engine = model.start(batch_invariant=False, max_tokens=16, num_tokens=4000)
    together = run_together(engine, [(index, 0) for index in range(len(REQUESTS))])
    assert any(answers != alone[index] for index, answers in together)


def test_a_request_of_many_samples(model: Model) -> None:
    asked = AskedRequest([3, 1, 4, 1, 5, 9], 7, REQUESTS[0].sampling, 12, 15)
    answers = [answer_alone(model.start(max_seqs=seqs), asked) for seqs in (1, 5, 16)]
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def test_a_decoder_of_kernels_computes_rows_alike_in_any_steps(tmp_path: Path) -> None:
    """Interpreted where there is no GPU. Rows decode and are computed in chunks, alone and with others."""
    pytest.importorskip("triton")
    from toka_async.attention.invariant.backend import InvariantChunks, InvariantDecode
    from toka_async.attention.paged import PagedAttention
    from toka_async.kernels.invariant.products import InvariantOps

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = make_checkpoint(tmp_path, "mistral", seed=1, sliding_window=5)
    spec = read_spec(folder)
    decoder = build_decoder(spec, torch.bfloat16, device, ops=InvariantOps())
    load_weights(decoder, folder)

    def compute(seed: int, num_rows: int) -> list[Tensor]:
        draw = random.Random(0)
        rows = [PagedRow([draw.randrange(250) for _ in range(9 - 2 * i)], 4 - i) for i in range(3)][:num_rows]
        cache = make_cache(spec, 12, 3, torch.bfloat16, device)
        attention = PagedAttention(
            cache,
            spec.attention.num_heads,
            spec.windows,
            lambda: InvariantDecode(cache, spec.attention.num_heads, 4),
            lambda: InvariantChunks(cache, spec.attention.num_heads),
        )
        run_rows(decoder, attention, rows, 3, iter(range(12)), seed)
        return [torch.cat(row.logits) for row in rows]

    together, (alone,) = compute(0, 3), compute(1, 1)
    assert torch.equal(together[0], alone)
    for first, second in zip(together, compute(2, 3), strict=True):
        assert torch.equal(first, second)
