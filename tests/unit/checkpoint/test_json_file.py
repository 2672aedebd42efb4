from __future__ import annotations

import os
from pathlib import Path

import pytest

from toka_async.checkpoint.json_file import JsonFile, ModelError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "holds a list, expected a JSON object"),
        ("7", "holds a int, expected a JSON object"),
    ],
)
def test_a_file_that_is_no_object(tmp_path: Path, text: str | bytes, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ModelError, match=problem) as caught:
        JsonFile(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        JsonFile(tmp_path / "config.json")


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a file"):
        JsonFile(tmp_path)


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match="is not a file"):
        JsonFile(tmp_path / "config.json")


@pytest.mark.parametrize("value", [2**31, 10**30])
def test_a_number_that_nothing_can_have(tmp_path: Path, value: int) -> None:
    with pytest.raises(ModelError, match=f"a is {value}: expected an integer of at most 2147483647"):
        JsonFile(write(tmp_path, f'{{"a": {value}}}')).integer("a")


def test_fields(tmp_path: Path) -> None:
    file = JsonFile(write(tmp_path, '{"a": 3, "b": 0.5, "c": true, "d": "x", "e": null, "f": {"g": 4}, "h": [1, 2]}'))
    assert file.integer("a") == 3
    assert file.integer("e", 9) == 9
    assert file.number("a") == 3.0
    assert file.number("b") == 0.5
    assert file.flag("c", False) is True
    assert file.flag("missing", True) is True
    assert file.text("d") == "x"
    assert file.section("f").integer("g") == 4
    assert not file.section("missing").has("g")
    assert file.token_ids("h") == (1, 2)
    assert file.token_ids("a") == (3,)
    assert file.token_ids("e", (5,)) == ()
    assert file.token_ids("missing", (5,)) == (5,)
    assert (file.has("a"), file.has("e"), file.has("missing")) == (True, False, False)


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("{}", "integer", "x is missing"),
        ('{"x": null}', "integer", "x is missing"),
        ('{"x": "3"}', "integer", "x is '3': expected an integer of at least 1"),
        ('{"x": true}', "integer", "x is True: expected an integer"),
        ('{"x": 0}', "integer", "x is 0: expected an integer of at least 1"),
        ('{"x": 1.5}', "integer", "x is 1.5: expected an integer"),
        ('{"x": "a"}', "number", "x is 'a': expected a number of at least 0"),
        ('{"x": -1}', "number", "x is -1: expected a number"),
        ('{"x": NaN}', "number", "x is nan: expected a number"),
        ('{"x": Infinity}', "number", "x is inf: expected a number"),
        ('{"x": 3}', "text", "x is 3: expected a string"),
        ('{"x": 3}', "section", "x is 3: expected an object"),
        ('{"x": [3, "a"]}', "token_ids", "expected a token id or a list of token ids"),
        ('{"x": -3}', "token_ids", "expected a token id or a list of token ids"),
    ],
)
def test_a_wrong_field(tmp_path: Path, text: str, kind: str, problem: str) -> None:
    file = JsonFile(write(tmp_path, text))
    with pytest.raises(ModelError) as caught:
        getattr(file, kind)("x")
    assert problem in str(caught.value)


def test_errors_name_the_section(tmp_path: Path) -> None:
    file = JsonFile(write(tmp_path, '{"a": {"b": {"x": 0}}}'))
    with pytest.raises(ModelError, match=r"config\.json: a\.b\.x is 0"):
        file.section("a").section("b").integer("x")


def test_a_wrong_flag(tmp_path: Path) -> None:
    file = JsonFile(write(tmp_path, '{"x": 1}'))
    with pytest.raises(ModelError, match="x is 1: expected true or false"):
        file.flag("x", False)
