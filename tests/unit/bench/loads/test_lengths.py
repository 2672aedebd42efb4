from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from toka_async.bench.loads.lengths import COLUMNS, Workload, chat, divide, gsm8k, read_lengths
from toka_async.cli import main

HEADER = ",".join(COLUMNS)


def written(path: Path, *lines: str) -> Path:
    file = path / "lengths.csv"
    file.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    return file


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


def test_a_workload_is_divided_in_order_or_in_turns() -> None:
    work = Workload(
        prompt_tokens=np.asarray([5, 7], np.int32),
        max_tokens=np.asarray([50, 70], np.int32),
        samples=np.asarray([3, 2], np.int32),
        output_tokens=np.asarray([1, 2, 3, 4, 5], np.int32),
    )
    apart, groups = divide(work, interleaved=False)
    assert groups.tolist() == [0, 0, 0, 1, 1]
    assert apart.output_tokens.tolist() == [1, 2, 3, 4, 5]
    assert apart.max_tokens.tolist() == [50, 50, 50, 70, 70]
    turns, groups = divide(work, interleaved=True)
    assert groups.tolist() == [0, 1, 0, 1, 0]
    assert turns.output_tokens.tolist() == [1, 4, 2, 5, 3]
    assert turns.prompt_tokens.tolist() == [5, 7, 5, 7, 5]
    assert turns.samples.tolist() == [1] * 5
