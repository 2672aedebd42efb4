"""With `model.batch_invariant` tokens and log-probs are the same bits alone, among others, and preempted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.cases.invariance import AskedRequest, answer_alone, list_answers, load_others, make_requests
from tests.drivers.engine import GREEDY, Engine
from tests.drivers.gpu_models import SHAPES, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

REQUESTS = make_requests(21, longest=700, max_tokens=60)
KINDS = [name for name, (_, fields) in SHAPES.items() if "linear_num_key_heads" not in fields]  # recurrent: refused
DTYPES = {"qwen3": "float16", "mistral": "float32"}  # bfloat16 for the others


@dataclass(slots=True)
class Model:
    """A model, and the answers to REQUESTS, each computed alone in large steps and without the prefix cache."""

    folder: Path
    dtype: str
    alone: list[list[object]]
    cache_dtype: str = "auto"

    def start(self, **options: int | bool) -> Engine:
        shape = {"device": "cuda", "dtype": self.dtype, "batch_invariant": True, "num_tokens": 200_000}
        shape["cache_dtype"] = self.cache_dtype
        return Engine(self.folder, **(shape | {"max_graph_seqs": 64} | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[*KINDS, "llama fp8", "qwen3 fp8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    shape, _, stored = request.param.partition(" ")
    made = Model(make_model(tmp_path_factory.mktemp(shape), shape), DTYPES.get(shape, "bfloat16"), [], stored or "auto")
    engine = made.start(max_tokens=2048, prefix=False)
    made.alone = [answer_alone(engine, asked) for asked in REQUESTS]
    return made


def check_together(model: Model, engine: Engine, num_others: int = 0, rounds: int = 1) -> None:
    """All requests at once, a few steps apart, beside others."""
    for _ in range(rounds):
        load_others(engine, num_others)
        received = []
        for index, asked in enumerate(REQUESTS):
            received.append(asked.submit_to(engine))
            if index % 3 == 0:
                engine.driver.turn()
        engine.driver.drain()
        for index, each in enumerate(received):
            assert list_answers(each) == model.alone[index], f"request {index}"


@pytest.mark.parametrize("max_graph_seqs", [0, 64])
def test_rows_alone_equal_rows_among_others(model: Model, max_graph_seqs: int) -> None:
    """With graphs and without, twice, so that the second time prompts are found in the cache."""
    engine = model.start(max_tokens=4096, max_seqs=128, max_graph_seqs=max_graph_seqs)
    check_together(model, engine, num_others=100, rounds=2)


def test_chunks_of_any_size_change_no_bit(model: Model) -> None:
    for max_tokens in (64, 333):
        check_together(model, model.start(max_tokens=max_tokens, max_seqs=32))


def test_preempted_rows_continue_with_the_same_bits(model: Model) -> None:
    engine = model.start(max_tokens=256, max_seqs=64, num_tokens=4096, until_full=True)
    check_together(model, engine)
    assert engine.driver.stats.num_preemptions > 0


def test_thousands_of_rows(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama")
    asked = AskedRequest(list(range(300)), 5, REQUESTS[0].sampling, 2, 200)
    model = Model(folder, "bfloat16", [])
    alone = answer_alone(model.start(max_seqs=4096, max_tokens=8192), asked)
    engine = model.start(max_seqs=4096, max_tokens=8192, num_tokens=1_000_000)
    for index in range(4000):
        AskedRequest([index % 250, 7, index % 11], index, GREEDY, 1, 100 + index % 100).submit_to(engine)
    received = asked.submit_to(engine)
    engine.driver.drain()
    assert list_answers(received) == alone


def test_two_starts_compute_the_same_bits(model: Model) -> None:
    engine = model.start(max_tokens=2048, prefix=False)
    assert [answer_alone(engine, asked) for asked in REQUESTS] == model.alone
