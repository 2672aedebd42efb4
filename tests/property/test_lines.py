"""Any input file of a batch: it has faults, or each of its lines has an answer or asks something."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.line_cases import LINES, encoded, spoiled
from toka_async.batches.lines import Checker, custom_id_of, read_lines
from toka_async.batches.results import done_line
from toka_async.openai.errors import ApiError
from toka_async.server.line_answers import num_prompts, parse_line, refused

ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b" \n\t", b"\x0c\n"])


def checked(path: Path, data: bytes) -> Checker:
    path.write_bytes(data)
    checker = Checker(path, max_lines=100, max_line_bytes=1 << 16)
    while not checker.done:
        checker.step()
    return checker


def check_line(raw: bytes, endpoint: str) -> None:
    """It asks something, or what it is answered is one line of JSON with its name."""
    custom_id = custom_id_of(raw)
    try:
        wire = parse_line(endpoint, raw)
    except ApiError as refusal:
        answered = refused(custom_id, refusal)
    else:
        assert wire.n * num_prompts(wire) > 0
        return
    done = done_line("batch_1", 0, len(raw), answered)
    assert (done.failed, answered.status) == (True, 400)
    assert done.data.count(b"\n") == 1
    assert msgspec.json.decode(done.data)["custom_id"] == custom_id


@settings(deadline=None, max_examples=40)
@given(lines=st.lists(st.tuples(spoiled() | st.binary(max_size=40), ENDS), max_size=5))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[bytes, bytes]]) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    checker = checked(path, b"".join(raw + end for raw, end in lines))
    if checker.faults:
        assert all(fault.message for fault in checker.faults)
        return
    read = read_lines(path, 0, 100, 1 << 20)
    assert len(read) == checker.total
    for each in read:
        check_line(each.raw, "")


@settings(deadline=None, max_examples=80)
@given(line=LINES, endpoint=st.sampled_from(["", "/v1/completions", "/v1/chat/completions"]))
def test_any_request(line: dict[str, object], endpoint: str) -> None:
    check_line(encoded(line, "a"), endpoint)
