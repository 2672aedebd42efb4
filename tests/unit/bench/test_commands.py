from __future__ import annotations

import pytest

from toka_async.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve-load", "--url", "http://127.0.0.1:9"], "no OpenAI-compatible server"),
        (["serve-load", "--load", "what"], "--load"),
        (["serve-load", "--samples", "0"], "--samples"),
        (["serve-load", "--plot", "x.png"], "pip install matplotlib"),
        (["step", "--rows", "1,x"], "--rows"),
        (["step", "--rows", "0"], "--rows"),
        (["step", "model.device=simulated"], "model.device=simulated"),
        (["step", "parallel.tp=2"], "parallel.tp=2: one rank alone is measured"),
        (["step", "model.path=/does/not/exist"], "/does/not/exist"),
        (["step", "schedule.max_seq=8"], "schedule.max_seqs"),
        (["products", "model.device=cpu"], "needs an NVIDIA GPU"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr("toka_async.bench.policy.policy_plot.find_spec", {}.get)
    try:
        code = main(["bench", *arguments])
    except SystemExit as stop:
        code = int(str(stop.code))
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert words in error
