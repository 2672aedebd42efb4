"""Any input file of a batch: it has faults, or each of its lines has an answer or asks something."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.lines import FILES, LINES, check_file, check_line, encoded


@settings(deadline=None, max_examples=40)
@given(data=FILES)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    check_file(tmp_path_factory.getbasetemp() / "lines", data)


@settings(deadline=None, max_examples=80)
@given(line=LINES, endpoint=st.sampled_from(["", "/v1/completions", "/v1/chat/completions"]))
def test_any_request(line: dict[str, object], endpoint: str) -> None:
    check_line(encoded(line, "a"), endpoint)
