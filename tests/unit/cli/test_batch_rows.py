"""What the command takes for rows, and its options; runs are in tests/e2e."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from toka_async.cli.batch_rows import check_request, has_rows, make_table, run_rows
from toka_async.cli.batch_run import BatchFileError
from toka_async.cli.parser import parse_arguments
from toka_async.config import Config, LimitsConfig
from toka_async.tables.requests import RowRequests
from toka_async.tables.source import TableError

ROW, LINE = '{"prompt": "p", "id": 1}\n', '{"custom_id": "a", "method": "POST", "url": "u", "body": {"prompt": "p"}}\n'


def parse(source: Path, *arguments: str, output: str = "out.jsonl") -> argparse.Namespace:
    return parse_arguments(["batch", "run", "-i", str(source), "-o", str(source.with_name(output)), *arguments])


def write(folder: Path, text: str, name: str = "in.jsonl") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_what_has_rows(tmp_path: Path) -> None:
    assert has_rows(parse(write(tmp_path, "\n" + ROW)))
    assert has_rows(parse(write(tmp_path, "\ufeff" + ROW)))
    assert has_rows(parse(tmp_path))
    assert has_rows(parse(tmp_path / "in.parquet"))
    assert has_rows(parse(write(tmp_path, '{"question": "q"}\n'), "--column", "question"))
    assert not has_rows(parse(write(tmp_path, LINE)))
    assert not has_rows(parse(write(tmp_path, "no JSON\n")))  # the check of lines says what is wrong
    assert not has_rows(parse(write(tmp_path, "")))
    assert not has_rows(parse(tmp_path / "missing.jsonl"))
    assert has_rows(parse(write(tmp_path, "no JSON\n"), "-n", "2"))
    assert has_rows(parse(write(tmp_path, "no JSON\n"), output="out.parquet"))


@pytest.mark.parametrize("option", ["-n=2", "--seed=1", "--temperature=0", "--chat", "--keep=", "--top-p=1"])
def test_lines_of_batches_say_themselves_what_they_ask(tmp_path: Path, option: str) -> None:
    with pytest.raises(BatchFileError, match=f"^{option.partition('=')[0]} is for rows"):
        has_rows(parse(write(tmp_path, LINE), option))


def test_lines_of_batches_are_answered_as_lines(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="answered as JSON lines"):
        has_rows(parse(write(tmp_path, LINE), output="out.parquet"))


def test_the_options(tmp_path: Path) -> None:
    options = ["-n", "4", "--seed", "7", "--temperature", "0", "--top-p", "0.9", "--max-tokens", "5", "--stop", "a"]
    options += ["--stop", "b", "--extra-body", '{"top_k": 3, "temperature": 1}', "--keep", "id", "--system", "s"]
    options += ["--answer-column", "a", "--response-column", "r", "model.device=simulated"]
    job = make_table(parse(write(tmp_path, ROW), *options, output="out.parquet"))
    assert job.requests.sampling == {"temperature": 0, "top_p": 0.9, "max_tokens": 5, "stop": ["a", "b"], "top_k": 3}
    assert (job.requests.n, job.requests.seed, job.requests.system, job.requests.column) == (4, 7, "s", "prompt")
    assert (job.format.keep, job.format.answer, job.format.response, job.format.n) == (("id",), "a", "r", 4)


def test_the_usual_options(tmp_path: Path) -> None:
    job = make_table(parse(write(tmp_path, ROW)))
    assert job.requests.sampling == {}
    assert (job.requests.n, job.requests.seed, job.requests.chat) == (1, None, False)
    assert job.format.keep == ("prompt", "id")
    assert job.folder == tmp_path / "out.jsonl.progress"


@pytest.mark.parametrize("body", ["[1]", "{", '{"prompt": "p"}'])
def test_a_wrong_body(tmp_path: Path, body: str) -> None:
    with pytest.raises(TableError, match="--extra-body"):
        make_table(parse(write(tmp_path, ROW), "--extra-body", body))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--extra-body", '{"top_kk": 3}'], "unknown field 'top_kk'; did you mean 'top_k'?"),
        (["--temperature", "9"], "'temperature'"),
        (["--extra-body", '{"min_tokens": 9}', "--max-tokens", "5"], "'min_tokens' (9) is above"),
        (["--stop", ""], "'stop' must not hold"),
        (["-n", "17000"], "'n' can be at most 16384"),
    ],
)
def test_what_would_fail_for_every_row_is_known_before_the_run(tmp_path: Path, options: list[str], part: str) -> None:
    source = write(tmp_path, ROW)
    with pytest.raises(BatchFileError, match="every row would fail") as caught:
        run_rows(Config(), parse(source, *options))
    assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("body", ['{"logprobs": 200}', '{"logprobs": true, "top_logprobs": 2}', '{"top_k": 3}'])
def test_fields_of_chats_or_of_texts_may_be_asked(body: str) -> None:
    check_request(RowRequests("c", sampling=json.loads(body)), LimitsConfig(max_logprobs=-1))


def test_mistakes_are_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="--errors"):
        run_rows(Config(), parse(write(tmp_path, ROW), "-e", "errors.jsonl"))
    with pytest.raises(BatchFileError, match="no column 'x' to keep"):
        run_rows(Config(), parse(write(tmp_path, ROW), "--keep", "x"))
