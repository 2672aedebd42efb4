from __future__ import annotations

from typing import Any

import pytest

from toka_async.client.errors import RequestError
from toka_async.client.fields import check_depth


def nest(num_objects: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(num_objects):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"structured_outputs": {"json": schema}}


def test_schemas_may_be_as_deep_as_documents_are() -> None:
    check_depth(nest(50))


def test_what_the_server_could_not_decode_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'structured_outputs' is nested too deeply"):
        check_depth(nest(500))
