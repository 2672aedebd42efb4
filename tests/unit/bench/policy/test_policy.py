"""Policies replayed on small workloads, as the command runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from toka_async.bench.loads.lengths import COLUMNS, Workload, chat, gsm8k, read_lengths
from toka_async.bench.policy.baselines import Oracle, Reserving
from toka_async.bench.policy.policy import PolicyComparison, PolicyResult
from toka_async.bench.policy.replay import Outcome, Replay
from toka_async.cli import main
from toka_async.messages import Ready

HEADER = ",".join(COLUMNS)
READY = Ready(num_pages=36, page_size=4, max_seqs=64, max_context=4096, vocab_size=10, max_tokens=64)


def written(path: Path, *lines: str) -> Path:
    file = path / "lengths.csv"
    file.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    return file


def small(seed: int) -> Workload:
    """Prompts of many samples and of one, in a cache for a few of them."""
    rng = np.random.default_rng(seed)
    samples = np.asarray([9, 1, 1, 6, 1, 1], np.int32)
    limit = np.full(samples.size, 40, np.int32)
    outputs = np.minimum(rng.geometric(0.06, int(samples.sum())), 40).astype(np.int32)
    return Workload(rng.integers(1, 30, samples.size).astype(np.int32), limit, samples, outputs)


def test_rows_of_a_group_are_samples_of_one_prompt(tmp_path: Path) -> None:
    work = read_lengths(written(tmp_path, "5,3,8,a", "7,1,9,", "5,8,8,a", "7,2,9,"))
    assert work.prompt_tokens.tolist() == [5, 7, 7]
    assert work.max_tokens.tolist() == [8, 9, 9]
    assert work.samples.tolist() == [2, 1, 1]
    assert work.output_tokens.tolist() == [3, 8, 1, 2]
    assert work.starts.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["5,3,8,a", "5,x,8,a"], ["line 3", "output_tokens", "'x'"]),
        (["0,3,8,a"], ["line 2", "prompt_tokens", "'0'"]),
        (["5,9,8,a"], ["line 2", "output_tokens is 9", "max_tokens 8"]),
        (["5,3,8,a", "6,3,8,a"], ["line 3", "prompt_tokens is 6", "'a'"]),
        (["5,3,8,a", "5,3,9,a"], ["line 3", "max_tokens is 9", "'a'"]),
        (["5,3,8"], ["line 2", "3 values"]),
        ([], ["no rows"]),
    ],
)
def test_a_wrong_row_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], words: list[str]
) -> None:
    assert main(["bench", "policy", "--trace", str(written(tmp_path, *lines))]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_a_missing_column_and_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt_tokens,output_tokens,group\n", encoding="utf-8")
    assert main(["bench", "policy", "--trace", str(file)]) == 2
    assert "line 1: no column 'max_tokens'" in capsys.readouterr().err
    assert main(["bench", "policy", "--trace", str(tmp_path / "none.csv")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_request_that_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "policy", "--trace", str(written(tmp_path, "50,1,50,")), "--cache-tokens", "64"]) == 2
    assert "request 0: prompt and max_tokens are 100 tokens" in capsys.readouterr().err


def test_json_has_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"20,{output},30,{i % 3}" for i, output in enumerate([4, 9, 30, 12, 7, 1, 22, 3, 8, 15, 6, 2])]
    assert main(["bench", "policy", "--trace", str(written(tmp_path, *rows)), "--cache-tokens", "160", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    result = json.loads(lines[0])
    assert list(result) == list(PolicyComparison.__struct_fields__)
    for name in ("lookahead", "oracle", "until_full", "reserving"):
        assert list(result[name]) == list(PolicyResult.__struct_fields__)
        assert result[name]["seconds"] > 0
        assert 0 < result[name]["cache_use"] <= 1
    assert (result["sequences"], result["output_tokens"], result["cache_tokens"]) == (12, 119, 160)
    assert result["oracle"]["seconds"] <= result["reserving"]["seconds"]


def replayed(work: Workload, policy: str) -> Outcome:
    if policy == "oracle":
        return Replay(work, READY, lambda running: Oracle(running, work, 2)).run()
    return Replay(work, READY, Reserving).run()


@pytest.mark.parametrize("seed", range(4))
def test_who_knows_the_lengths_or_reserves_never_preempts(seed: int) -> None:
    work = small(seed)
    for policy in ("oracle", "reserving"):
        outcome = replayed(work, policy)
        assert outcome.stats.num_preemptions == 0
        assert outcome.stats.generated_tokens == work.num_output_tokens
        assert max(outcome.pages) <= READY.num_pages
    use = [replayed(work, policy).cache_use(READY.num_pages) or 0.0 for policy in ("oracle", "reserving")]
    assert use[0] > use[1] > 0


def test_drawn_lengths_look_like_what_they_are_named_after() -> None:
    work = gsm8k(16, 256, seed=1)
    assert work.output_tokens.size == 4096
    assert 650 < work.prompt_tokens.mean() < 750
    assert 150 < work.output_tokens.mean() < 300
    assert 0.01 < (work.output_tokens == 1024).mean() < 0.06
    means = work.output_tokens.reshape(16, 256).mean(axis=1)
    assert means.max() > 1.5 * means.min()
    talk = chat(2000, 1, seed=1)
    assert talk.samples.max() == 1
    assert np.quantile(talk.output_tokens, 0.99) > 4 * talk.output_tokens.mean()
    assert (talk.output_tokens <= talk.max_tokens).all()


def test_a_plot_needs_its_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toka_async.bench.policy.policy_plot.find_spec", {}.get)
    file = written(tmp_path, "5,3,8,a")
    assert main(["bench", "policy", "--trace", str(file), "--plot", str(tmp_path / "use.png")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install matplotlib" in error
