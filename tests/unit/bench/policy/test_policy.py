from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from toka_async.bench.loads.lengths import COLUMNS, Workload
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
    assert list(result["orders"]) == ["n samples of a request", "requests by prompt", "requests in turns"]
    for order in result["orders"].values():
        assert sorted(order["samples"]) == order["samples"]
        assert order["groups"][-1] == order["samples"][-1]  # the last group ends with the last sample
        assert all(group >= sample for group, sample in zip(order["groups"], order["samples"], strict=True))


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


def test_a_plot_needs_its_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toka_async.bench.policy.policy_plot.find_spec", {}.get)
    file = written(tmp_path, "5,3,8,a")
    assert main(["bench", "policy", "--trace", str(file), "--plot", str(tmp_path / "use.png")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install matplotlib" in error
