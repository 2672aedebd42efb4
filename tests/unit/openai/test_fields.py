from __future__ import annotations

from pathlib import Path

import pytest

import toka_async.openai
from toka_async.openai.errors import ApiError
from toka_async.openai.fields import UNSUPPORTED, check_fields

README = Path(toka_async.openai.__file__).with_name("README.md")
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # taken, and nothing is done with them


def test_the_table_of_differences_names_every_field() -> None:
    text = README.read_text(encoding="utf-8")
    names = [*UNSUPPORTED, *LABELS]
    shown = ["guided_" if name.startswith("guided_") else name for name in names]
    assert [name for name in shown if f"`{name}" not in text] == []


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("tools", "; leave it out, or give an empty list"),
        ("verbosity", '; leave it out, or give "medium"'),
        ("tool_choice", '; leave it out, or give "none" or "auto"'),
        ("suffix", "; leave it out, or give an empty string"),
        ("store", "; leave it out, or give false"),
        ("audio", "; leave it out"),
    ],
)
def test_what_to_write_instead(name: str, instead: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_fields({name: 5}, (), UNSUPPORTED)
    assert caught.value.message == f"'{name}' is not supported{instead}"
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_a_nested_field_is_named_with_its_place() -> None:
    with pytest.raises(ApiError) as caught:
        check_fields({"padding": True}, ("usage",), {"padding": (False,)}, "options.")
    assert caught.value.param == "options.padding"
    assert caught.value.message == "'options.padding' is not supported; leave it out, or give false"
    assert check_fields({"padding": False, "usage": 1}, ("usage",), {"padding": (False,)}, "options.") == {"usage": 1}
