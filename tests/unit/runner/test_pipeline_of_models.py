"""A real, tiny model in stages computes what it does as a whole: tokens, log-probs, those of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.cases.models import GEMMA4_SMALL, make_checkpoint
from tests.drivers.core import CoreDriver, Received
from tests.drivers.page_rank import submit
from tests.drivers.stage_runners import StageRunners, setups, stage_runners
from toka_async.arrays import as_f32
from toka_async.attention.kv_cache import make_caches
from toka_async.attention.layered.backend import LayeredCache
from toka_async.attention.states.build import add_states, build_states
from toka_async.bar import show_nothing
from toka_async.checkpoint.division import make_stage_spec, stage_parts
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import read_spec
from toka_async.messages import Ready, TokenSampling
from toka_async.model.weights import build_decoder, load_weights
from toka_async.runner.pipeline import StageSetup
from toka_async.runner.runner import Runner
from toka_async.startup.rank_attention import AttentionSetup, build_rank_attention

CPU = torch.device("cpu")
READY = Ready(num_pages=300, page_size=4, max_seqs=12, max_context=200, vocab_size=261, max_tokens=40, num_snapshots=9)
WINDOWED = replace(READY, num_snapshots=0, num_window_pages=40, window=24)
SAMPLINGS = (
    TokenSampling(temperature=0),
    TokenSampling(temperature=0.9, num_logprobs=3, num_prompt_logprobs=2),
    TokenSampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, num_logprobs=0),
    TokenSampling(temperature=0, num_logprobs=1, num_prompt_logprobs=0),
)
SHARED = [(5 * i) % 250 for i in range(33)]
PROMPTS = [[3], [*range(9, 70)], SHARED, SHARED, [*SHARED, 4, 5], SHARED[:17]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows in some of the layers, and a head that is tied to the embedding."""
    fields = {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 2}
    return make_checkpoint(
        tmp_path_factory.mktemp("stages"), "qwen3", num_hidden_layers=5, tie_word_embeddings=True, **fields
    )


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recurrent layers and others in turns."""
    return make_checkpoint(tmp_path_factory.mktemp("stages"), "qwen3_next", mlp_only_layers=[0])


def in_stages(folder: Path, num_stages: int, num_parts: int, ready: Ready = READY) -> StageRunners:
    spec = read_spec(folder)
    parts = stage_parts(spec, num_stages, 1)

    def runner(setup: StageSetup | None, stage: int) -> Runner:
        own = make_stage_spec(spec, parts[stage])
        decoder = build_decoder(spec, torch.float32, CPU, part=parts[stage])
        load_weights(decoder, folder)
        num_window_pages = ready.num_window_pages + 1 if ready.window else 0
        caches = make_caches(own, 301, 4, torch.float32, CPU, num_window_pages=num_window_pages)
        limits = RankLimits(ready.max_seqs, ready.max_tokens, ready.max_context)
        attention = build_rank_attention(
            own, caches, AttentionSetup("reference", False, limits, None, False, show_nothing)
        )
        states = build_states(own, ready.max_seqs, ready.num_snapshots, torch.float32, CPU, can_sleep=False)
        if states is not None:
            attention = add_states(attention, states)
        return Runner(ready, CPU, decoder, LayeredCache(caches), attention, stage=setup, states=states)

    if num_stages == 1:
        return StageRunners([runner(None, 0)])
    return stage_runners(runner, setups(num_stages, num_parts, spec.passed_size, torch.float32))


def answers(rank: StageRunners, ready: Ready = READY) -> list[Received]:
    driver = CoreDriver(ready, max_tokens=ready.max_tokens, rank=rank, group_min_seqs=2, group_min_tokens=8)
    received = [
        driver.submit(submit(i, prompt, sampling=SAMPLINGS[i % len(SAMPLINGS)], n=1 + i % 3, max_tokens=9))
        for i, prompt in enumerate(PROMPTS)
    ]
    driver.drain()
    return received


def check(got: list[Received], expected: list[Received]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.failed is None
        for sample, right in zip(one.samples, other.samples, strict=True):
            assert sample.token_ids == right.token_ids
            assert sample.logprobs == pytest.approx(right.logprobs, abs=1e-4)
            assert sample.top_ids == right.top_ids
        prefilled, right_one = one.prefilled, other.prefilled
        assert prefilled is not None
        assert right_one is not None
        np.testing.assert_allclose(as_f32(prefilled.logprobs), as_f32(right_one.logprobs), atol=1e-4)
        assert prefilled.top_ids == right_one.top_ids


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[Received]:
    return answers(in_stages(folder, 1, 1))


@pytest.mark.parametrize(("num_stages", "num_parts"), [(2, 1), (2, 3), (3, 2), (5, 6)])
def test_stages_answer_as_the_whole_model_does(
    folder: Path, whole: list[Received], num_stages: int, num_parts: int
) -> None:
    check(answers(in_stages(folder, num_stages, num_parts)), whole)


@pytest.mark.parametrize(("num_stages", "num_parts"), [(1, 1), (2, 3), (5, 2)])
def test_stages_give_back_pages_behind_windows(
    folder: Path, whole: list[Received], num_stages: int, num_parts: int
) -> None:
    """Some stages have only layers with a window, some only others. Here the model alone gives nothing back."""
    check(answers(in_stages(folder, num_stages, num_parts, WINDOWED), WINDOWED), whole)


def test_stages_pass_on_the_inputs_of_layers(tmp_path: Path) -> None:
    """Beside residuals. The last stage has all layers that read others' keys."""
    folder = make_checkpoint(tmp_path, "gemma4_text", **(GEMMA4_SMALL | {"global_head_dim": 8}))
    check(answers(in_stages(folder, 2, 3)), answers(in_stages(folder, 1, 1)))


def test_stages_keep_the_states_of_their_layers(hybrid: Path) -> None:
    """A prompt's parts are in several micro-batches, and so are the states that it keeps."""
    check(answers(in_stages(hybrid, 2, 3)), answers(in_stages(hybrid, 1, 1)))
