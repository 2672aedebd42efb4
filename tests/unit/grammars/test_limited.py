"""With real processes, of the built-in model's tokens."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cases.grammars import END_IDS, NUM_TOKENS, load_tokenizer
from toka_async.grammars import limited
from toka_async.grammars.lark import make_grammar, write_json
from toka_async.grammars.limited import EXCESSIVE, LimitedChecks

GOOD, BAD = make_grammar("/a+/"), make_grammar("/a(/")
ENDLESS = make_grammar(write_json({"type": "integer", "multipleOf": 99_999_989}, strict=True))


@pytest.fixture
def checks() -> Iterator[LimitedChecks]:
    made = LimitedChecks(load_tokenizer().backend.to_str, NUM_TOKENS, END_IDS)
    yield made
    made.close()


def process_of(checks: LimitedChecks) -> int:
    assert checks._process is not None
    return checks._process.pid


def test_errors_are_those_of_the_library(checks: LimitedChecks) -> None:
    assert checks.find_error(GOOD) == ""
    pid = process_of(checks)
    assert "unclosed group" in checks.find_error(BAD)
    assert checks.find_error(GOOD) == ""
    assert process_of(checks) == pid


@pytest.mark.filterwarnings("default")
def test_a_grammar_without_measure_is_refused_and_the_next_ones_are_checked(checks: LimitedChecks) -> None:
    assert checks.find_error(ENDLESS) == EXCESSIVE
    assert checks.find_error(GOOD) == ""


def test_a_killed_process_is_started_again(checks: LimitedChecks) -> None:
    assert checks.find_error(GOOD) == ""
    os.kill(process_of(checks), signal.SIGKILL)
    with pytest.raises(OSError, match="was killed"):
        checks.find_error(GOOD)
    assert checks.find_error(GOOD) == ""


def test_a_process_that_does_not_start_is_said(checks: LimitedChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "_COMMAND", ("/bin/true",))
    for _ in range(2):
        with pytest.raises(OSError, match="does not start"):
            checks.find_error(GOOD)


def test_closing_ends_a_check(checks: LimitedChecks) -> None:
    errors = list[OSError]()

    def check() -> None:
        try:
            checks.find_error(ENDLESS)
        except OSError as error:
            errors.append(error)

    assert checks.find_error(GOOD) == ""
    thread = threading.Thread(target=check)
    thread.start()
    time.sleep(0.1)
    checks.close()
    thread.join()
    assert [str(error) for error in errors] == ["the process that checks grammars was killed"]
    with pytest.raises(OSError, match="no more"):
        checks.find_error(GOOD)
