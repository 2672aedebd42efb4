from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from toka_async.cli.chat import chat
from toka_async.cli.ping import Message, PingError, PingQuestion, Server


class Talking(Server):
    """Answers `n: the last message`; remembers what it was asked. answer: makes other pieces."""

    def __init__(self, answer: Callable[[str], Iterator[str]] | None = None) -> None:
        super().__init__("http://nowhere")
        self.asked: list[list[Message]] = []
        self._answer = answer

    def stream(self, question: PingQuestion) -> Generator[str]:
        self.asked.append([*question.messages])
        said = question.messages[-1]["content"]
        yield from self._answer(said) if self._answer else (f"{len(self.asked)}: ", said)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the user types, at a terminal; exceptions are raised. Then the input ends."""

    def say(*lines: object, is_terminal: bool = True) -> None:
        typed = iter(lines)

        def read(_prompt: str = "") -> Any:
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: is_terminal, raising=False)

    return say


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def test_what_was_said_is_part_of_the_next_question(
    say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    say("hello", "", "and?", "/exit", "never")
    server = Talking()
    assert chat(server, PingQuestion(temperature=0.5), system="be brief") == 0
    begun = [{"role": "system", "content": "be brief"}]
    assert server.asked == [[*begun, user("hello")], [*begun, user("hello"), assistant("1: hello"), user("and?")]]
    assert capsys.readouterr().out.splitlines()[1:] == ["1: hello", "2: and?"]


def test_clear_begins_anew_and_the_system_message_stays(say: Callable[..., None]) -> None:
    say("a", "/clear", "b")
    server = Talking()
    chat(server, PingQuestion(), system="s")
    assert server.asked[-1] == [{"role": "system", "content": "s"}, user("b")]


def test_an_unknown_command_is_not_sent(say: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    say("/helpp", "/etc/passwd is a file?")
    server = Talking()
    chat(server, PingQuestion())
    assert [asked[-1]["content"] for asked in server.asked] == ["/etc/passwd is a file?"]
    assert "unknown command /helpp; /clear starts over" in capsys.readouterr().out


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(said: str) -> Iterator[str]:
        yield f"half of {said}"
        if said == "a":
            raise KeyboardInterrupt

    say(KeyboardInterrupt(), "a", "b")
    server = Talking(interrupted)
    assert chat(server, PingQuestion()) == 0
    assert server.asked[1] == [user("a"), assistant("half of a"), user("b")]
    assert "half of a [stopped]\n" in capsys.readouterr().out


def test_a_question_that_failed_is_not_part_of_the_conversation(
    say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(said: str) -> Iterator[str]:
        if said == "a":
            raise PingError("no answer")
        yield said

    say("a", "b")
    server = Talking(failing)
    assert chat(server, PingQuestion()) == 0
    assert server.asked[1] == [user("b")]
    assert "toka-async: no answer\n" in capsys.readouterr().err


def test_a_script_hears_of_a_failure(say: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def failing(_: str) -> Iterator[str]:
        raise PingError("no answer")

    say("a", is_terminal=False)
    assert chat(Talking(failing), PingQuestion()) == 1
    say("a", is_terminal=False)
    assert chat(Talking(), PingQuestion()) == 0
    assert capsys.readouterr().out == "\n1: a\n"
