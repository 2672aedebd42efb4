"""A model in stages, each some processes: its tokens, and its end when one of them dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.quantized import CHANNELS, dequantize_checkpoint, quantize_checkpoint
from tests.processes.parallel import OPTIONS, REQUESTS, TIE, Reference, ask_all, kill_under_load, make_model
from tests.processes.serving import serving
from toka_async.topology import Layout

TOKENS = 8


@pytest.mark.parametrize(
    ("layout", "tied", "victim", "family", "more"),
    [
        (Layout(pp=3), True, "rank-0-1", "qwen3", ()),
        pytest.param(Layout(pp=2, tp=2), False, "rank-0-2", "qwen3", (), marks=pytest.mark.slow),
        (Layout(pp=2, tp=2), False, "rank-0-3", "gpt_oss", ("parallel.ep=2",)),
    ],
)
def test_greedy_tokens_equal_the_reference_and_no_death_is_missed(
    tmp_path: Path, layout: Layout, tied: bool, victim: str, family: str, more: tuple[str, ...]
) -> None:
    model = make_model(tmp_path / "model", family, tie_word_embeddings=tied)
    options = (*more, f"model.path={model}", f"parallel.pp={layout.pp}", f"parallel.tp={layout.tp}", *OPTIONS)
    with serving(tmp_path, *options) as server:
        assert {f"rank-0-{rank}" for rank in range(layout.num_ranks)} < set(server.children)
        answers = ask_all(server, TOKENS)
        metrics = server.get("/metrics")[1]
        outcomes = kill_under_load(server, victim, 400)
        assert (outcomes.num_right, outcomes.num_wrong) == (0, 0)
        assert sum(f"{victim} was killed by SIGKILL" in message for message in outcomes.messages) > len(REQUESTS)
        assert server.wait_for_all() == 1
    for stage in range(layout.pp):
        assert f'toka:pipeline_seconds_total{{stage="{stage}",state="stalled"}}' in metrics
    if family == "gpt_oss":
        for layer in range(8):
            assert f'toka:expert_peak_load{{layer="{layer}"}}' in metrics
    reference = Reference(model)
    prompts = [prompt for prompt, num_samples in REQUESTS for _ in range(num_samples)]
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == TOKENS
        assert reference.gap(prompt, tokens) < TIE


@pytest.mark.slow
def test_stages_quantize_what_they_load(tmp_path: Path) -> None:
    """The tokens are those of the model that the 8-bit weights stand for."""
    model = make_model(tmp_path / "model")
    with serving(tmp_path, f"model.path={model}", "model.quantize=fp8", "parallel.pp=2", *OPTIONS) as server:
        answers = ask_all(server, TOKENS)
    quantized = quantize_checkpoint(model, tmp_path / "quantized", CHANNELS)
    reference = Reference(dequantize_checkpoint(quantized, tmp_path / "exact"))
    prompts = [prompt for prompt, num_samples in REQUESTS for _ in range(num_samples)]
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert reference.gap(prompt, tokens) < TIE
