from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from toka_async.openai.errors import ApiError
from toka_async.server.http.query import Query

KNOWN = {"after", "limit", "mode", "quick", "tags"}


def query(text: str) -> Query:
    return Query(make_mocked_request("GET", f"/x?{text}"), KNOWN, {"tags"})


def test_parameters() -> None:
    given = query("after=a&limit=5&mode=slow&quick=True&tags=a&tags=b")
    assert given.text("after") == "a"
    assert given.number("limit", 1, 9) == 5
    assert given.choice("mode", ("fast", "slow"), "fast") == "slow"
    assert given.flag("quick", default=False)
    assert given.choices("tags", ("a", "b", "c")) == ["a", "b"]


def test_without_parameters() -> None:
    given = query("")
    assert given.text("after") is None
    assert given.number("limit", 7, 9) == 7
    assert given.choice("mode", ("fast", "slow"), "fast") == "fast"
    assert given.flag("quick", default=True)
    assert given.choices("tags", ("a",)) == []


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("other=1", "other"),
        ("after=1&after=2", "after"),
        ("limit=0", "limit"),
        ("limit=10", "limit"),
        ("limit=", "limit"),
        ("mode=", "mode"),
        ("mode=FAST", "mode"),
        ("quick=", "quick"),
        ("quick=yes", "quick"),
    ],
)
def test_wrong_ones_are_named(text: str, param: str) -> None:
    def read() -> Any:
        given = query(text)
        return [given.number("limit", 1, 9), given.choice("mode", ("fast",), "fast"), given.flag("quick", default=True)]

    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.param == param
    assert caught.value.status == 400
