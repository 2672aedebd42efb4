from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from toka_async.bench.loads.served import BenchError
from toka_async.bench.loads.texts import Problem, few_shot, invent_prompts, read_problems, word_problem

PROBLEMS = [Problem(f"question {i}?", f"answer {i}") for i in range(8)]


def test_a_question_comes_after_worked_examples_of_its_own() -> None:
    prompts = few_shot(PROBLEMS, PROBLEMS, 5, 2, random.Random(1))
    asked = [prompt.rpartition("Question: ")[2] for prompt in prompts]
    assert len(set(asked)) == 5
    for prompt, last in zip(prompts, asked, strict=True):
        assert re.fullmatch(
            r"(Question: question \d\?\nAnswer: answer \d\n\n){2}Question: question \d\?\nAnswer:", prompt
        )
        assert prompt.count(last.partition("\n")[0]) == 1  # its answer is not among the examples
    assert len({prompt.rpartition("Question: ")[0] for prompt in prompts}) > 1


@pytest.mark.parametrize(("prompts", "shots", "name"), [(9, 2, "--prompts 9"), (2, 8, "--shots 8")])
def test_too_few(prompts: int, shots: int, name: str) -> None:
    with pytest.raises(BenchError, match=name):
        few_shot(PROBLEMS, PROBLEMS, prompts, shots, random.Random(1))


def test_made_up_problems_are_right_and_differ() -> None:
    draw = random.Random(3)
    for _ in range(20):
        problem = word_problem(draw)
        for left, sign, right, result in re.findall(r"(\d+) ([+-]) (\d+) = (-?\d+)", problem.answer):
            assert int(left) + (int(right) if sign == "+" else -int(right)) == int(result)
        assert problem.answer.endswith(f"#### {result}")
        assert problem.question.endswith("in the end?")
    prompts = invent_prompts(6, 4, draw)
    assert len({prompt[:120] for prompt in prompts}) == 6
    assert all(prompt.count("Question:") == 5 and prompt.endswith("Answer:") for prompt in prompts)


def test_files(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"question": p.question, "answer": p.answer, "level": 1}) + "\n" for p in PROBLEMS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert read_problems(tmp_path / "a.jsonl") == read_problems(tmp_path / "a.jsonl.gz") == PROBLEMS


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"question": "q", "answer": "a"}\n{"question": "q"}\n', "line 2"),
        ("a.jsonl", b"", "no lines"),
        ("a.jsonl.gz", b"nothing compressed", "gzip"),
        ("a.jsonl", b"\xff", "utf-8"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BenchError, match=words) as caught:
        read_problems(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        read_problems(tmp_path / "none")
