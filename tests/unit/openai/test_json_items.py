from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.openai import json_items
from toka_async.openai.json_items import count_items

TEXT = st.text(st.sampled_from('a,[{"\\é\n'), max_size=8)
VALUE = st.recursive(
    st.one_of(st.none(), st.integers(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
)


def items_of(value: Any) -> int:
    """Containers, and elements and pairs but the first of each container."""
    match value:
        case dict() | list():
            inner = list(value.values()) if isinstance(value, dict) else value
            return 1 + max(len(inner) - 1, 0) + sum(map(items_of, inner))
    return 0


@given(value=VALUE, step=st.integers(1, 9), spaces=st.booleans(), is_ascii=st.booleans())
def test_what_is_in_strings_does_not_count(value: Any, step: int, spaces: bool, is_ascii: bool) -> None:
    raw = json.dumps(value, indent=1 if spaces else None, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_items, "STEP", step)
        assert count_items(raw, -1) == items_of(value)
        assert count_items(bytearray(raw), 10**9) >= items_of(value)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_slashes", range(6))
def test_backslashes_count_across_steps(num_slashes: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_items, "STEP", size)
    raw = b'["' + b"\\" * num_slashes + (b'"' if num_slashes % 2 else b"") + b'", [1, ","]]'
    json.loads(raw)
    assert count_items(raw, -1) == 4
