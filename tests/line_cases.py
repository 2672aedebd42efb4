"""Lines of batches that are almost right, as hypothesis makes them."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.wire_cases import FLOATS, WORDS, bits, cuts
from toka_async.openai.requests import ChatRequest, CompletionRequest

FIELDS = sorted({*ChatRequest.__struct_encode_fields__, *CompletionRequest.__struct_encode_fields__, "tools", "x"})
URLS = ("/v1/completions", "/v1/chat/completions")
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, -1, 2**31, 2**63, 2**64, 10**40])
    | FLOATS.filter(lambda value: abs(value) < 1e308)  # others are no JSON
    | WORDS
    | st.text(max_size=8).filter(lambda text: text.isprintable())
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
MESSAGES = st.just([{"role": "user", "content": "hi"}]) | st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "x"]), VALUES), max_size=3
)
BODIES: st.SearchStrategy[Any] = (
    st.fixed_dictionaries({"prompt": st.just("hi") | VALUES, "max_tokens": st.just(2)})
    | st.fixed_dictionaries({"messages": MESSAGES, "max_tokens": st.just(2)})
    | st.builds(
        lambda fields: {"prompt": "hi", "max_tokens": 2} | fields, st.dictionaries(st.sampled_from(FIELDS), VALUES)
    )
    | VALUES
)


def almost(body: Any, url: Any, method: Any, more: dict[str, Any]) -> dict[str, Any]:
    return {"method": method, "url": url, "body": body} | more


LINES = st.builds(
    almost,
    BODIES,
    st.sampled_from(URLS) | VALUES,
    st.sampled_from(["POST"] * 5 + ["GET"]) | VALUES,
    st.just({}) | st.dictionaries(st.sampled_from(["method", "url", "body", "x"]), VALUES, max_size=1),
)


def encoded(line: dict[str, Any], custom_id: object) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id} | line)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A line whose bytes are wrong somewhere, or are not."""
    frames = [encoded(draw(LINES), draw(st.sampled_from(["a", "b", "c"]) | VALUES))]
    for _ in range(draw(st.integers(0, 2))):
        frames = draw(st.sampled_from([bits, cuts]))(draw, frames)
    return frames[0]
