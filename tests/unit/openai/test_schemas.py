from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from toka_async.openai.fields import Unsupported
from toka_async.openai.generation import RequestLimits
from toka_async.openai.requests import CompletionRequest, WireRequest
from toka_async.openai.schemas import refer_to, request_schemas, response_schemas

LIMITS = RequestLimits(max_context=100, cache_tokens=80, vocab_size=50, max_n=4)


class Inner(WireRequest, frozen=True, kw_only=True):
    unsupported: ClassVar[Unsupported] = {"neutral": (1,), "never": ()}

    flag: bool = False


class Asked(WireRequest, frozen=True, kw_only=True):
    needed: int
    max_tokens: Annotated[int, Meta(ge=0, le=1000)] | None = None
    inner: Inner | None = None


class Answered(msgspec.Struct, kw_only=True):
    kind: str = "x"
    raw: msgspec.Raw | int | None = None
    left_out: int | UnsetType = UNSET


def test_requests() -> None:
    schemas = request_schemas([Asked], "tiny", LIMITS)
    fields = schemas["Asked"]["properties"]
    assert fields["needed"] == {"type": "integer"}
    assert fields["max_tokens"] == {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 80}, {"type": "null"}]}
    assert fields["inner"] == {"anyOf": [refer_to(Inner), {"type": "null"}]}
    assert schemas["Inner"]["properties"]["flag"] == {
        "anyOf": [{"type": "boolean"}, {"type": "null"}],
        "default": False,
    }
    assert schemas["Inner"]["properties"]["neutral"]["enum"] == [1, None]
    assert "never" not in schemas["Inner"]["properties"]
    assert schemas["Asked"]["additionalProperties"] == {"type": "null"}


def test_responses() -> None:
    schema = response_schemas([Answered])["Answered"]
    assert schema["required"] == ["kind", "raw"]
    assert schema["properties"] == {
        "kind": {"type": "string"},
        "raw": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "left_out": {"type": "integer"},
    }


def test_making_schemas_changes_no_constants() -> None:
    first = request_schemas([CompletionRequest], "tiny", LIMITS)
    other = request_schemas([CompletionRequest], "tiny", msgspec.structs.replace(LIMITS, vocab_size=1000))
    assert first == request_schemas([CompletionRequest], "tiny", LIMITS)
    assert first != other


def test_unsupported_fields_have_their_neutral_values() -> None:
    fields = request_schemas([CompletionRequest], "tiny", LIMITS)["CompletionRequest"]["properties"]
    assert fields["tool_choice"]["enum"] == ["none", "auto", None]
    assert fields["suffix"]["enum"] == ["", None]
    assert "audio" not in fields
