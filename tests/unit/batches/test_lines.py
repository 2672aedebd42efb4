from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.batches import lines
from toka_async.batches.lines import MAX_FAULTS, Checker, read_lines
from toka_async.batches.records import Fault


def checked(path: Path, data: bytes, max_lines: int = 1000, max_line_bytes: int = 1 << 16) -> Checker:
    path.write_bytes(data)
    checker = Checker(path, max_lines, max_line_bytes)
    while not checker.done:
        checker.step()
    return checker


def faults(path: Path, data: bytes, **limits: int) -> list[tuple[str, int | None]]:
    return [(fault.code, fault.line) for fault in checked(path, data, **limits).faults]


def line(custom_id: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/x", "body": {}}).encode()


def test_lines_are_counted_and_blank_ones_are_not(tmp_path: Path) -> None:
    checker = checked(tmp_path / "a", b"\n" + line("a") + b"\r\n  \n" + line("b") + b"\n\n" + line("c"))
    assert (checker.total, checker.faults) == (3, [])


def test_blank_lines_are_limited_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_BLANK", 5)
    assert checked(tmp_path / "a", b"\n" * 24 + line("a"), max_lines=10).faults == []
    (fault,) = checked(tmp_path / "a", b"\n" * 25 + line("a"), max_lines=10).faults
    assert (fault.code, "blank ones counted" in fault.message) == ("too_many_lines", True)


def test_lines_that_ask_for_another_model_where_only_one_answers(tmp_path: Path) -> None:
    def asking(custom_id: str, **body: object) -> bytes:
        return json.dumps({"custom_id": custom_id, "body": body}).encode() + b"\n"

    fine = asking("a", model="demo") + asking("b") + asking("c", model=None) + asking("d", model=5) + line("e") + b"\n"
    path = tmp_path / "a"
    path.write_bytes(fine + asking("f", model="gpt-4"))
    for model, found in (("", []), ("demo", [("model_not_found", 6)])):
        checker = Checker(path, 100, 1 << 16, model)
        while not checker.done:
            checker.step()
        assert [(fault.code, fault.line) for fault in checker.faults] == found


def test_a_byte_order_mark_is_skipped_at_the_start_alone(tmp_path: Path) -> None:
    path, mark = tmp_path / "a", b"\xef\xbb\xbf"
    assert faults(path, mark + b"\n" + line("a") + b"\n" + mark + line("b")) == [("invalid_json_line", 3)]
    assert checked(path, mark + line("a") + b"\n" + line("b")).faults == []
    assert [each.raw for each in read_lines(path, 0, 9, 1000)] == [line("a"), line("b")]
    assert read_lines(path, 0, 1, 1000)[0].end == len(mark + line("a")) + 1


def test_what_makes_a_file_useless(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert faults(path, b" \n\n") == [("empty_file", None)]
    assert faults(path, line("a") + b"\n{\n[1]\nnull\n\xff\n") == [
        ("invalid_json_line", 2),
        ("invalid_custom_id", 3),
        ("invalid_custom_id", 4),
        ("invalid_json_line", 5),
    ]
    assert faults(path, b"\n".join([line(""), line(5), b"{}", line("x" * 600)])) == [
        ("invalid_custom_id", number) for number in (1, 2, 3, 4)
    ]
    assert faults(path, b"\n".join([line("a"), b"", line("b"), line("a")])) == [("duplicate_custom_id", 4)]
    assert faults(path, line("a") + b"\n" + line("b"), max_lines=1) == [("too_many_lines", None)]
    assert faults(path, line("a" * 100) + b"\n" + line("b"), max_line_bytes=90) == [("line_too_long", 1)]
    assert faults(path, line("a") + b"\n" + b"x" * 3_000_000, max_line_bytes=90) == [("line_too_long", 2)]
    assert checked(path, b"").faults == [Fault(code="empty_file", message="the input file has no lines")]


def test_not_every_fault_is_told(tmp_path: Path) -> None:
    assert len(checked(tmp_path / "a", b"nonsense\n" * 100).faults) == MAX_FAULTS


def test_lines_longer_than_a_block_are_read_whole(tmp_path: Path) -> None:
    long = line("l" * 400) + b" " * 2_500_000 + b"\n"
    checker = checked(tmp_path / "a", long + line("b"), max_line_bytes=1 << 20)
    assert [fault.code for fault in checker.faults] == ["line_too_long"]
    checker = checked(tmp_path / "a", long + line("b"), max_line_bytes=1 << 22)
    assert (checker.total, checker.faults) == (2, [])


@given(st.lists(st.sampled_from(["", " ", "x", "yy", "zzz\r"])), st.integers(1, 4), st.integers(1, 6))
def test_reading_in_pieces_reads_everything(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], max_lines: int, max_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces"
    path.write_text("\n".join(texts))
    offset, seen = 0, []
    while lines := read_lines(path, offset, max_lines, max_bytes):
        assert len(lines) <= max_lines
        seen += [each.raw.decode() for each in lines]
        offset = lines[-1].end
    assert seen == [text.strip() for text in texts if text.strip()]


@given(st.binary(max_size=200))
def test_no_bytes_break_the_checker(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    checker = checked(path, data)
    assert checker.faults or checker.total
