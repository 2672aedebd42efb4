from __future__ import annotations

import io
from collections.abc import Iterator

from tests.fakes.terminal import Terminal
from toka_async.cli.ask import ask, sample_lines
from toka_async.cli.ping import PingQuestion, PingSamples, Server


class Answers(Server):
    """Gives the same samples to every question."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__("http://nowhere")
        self.texts = texts

    def stream(self, question: PingQuestion) -> Iterator[str]:  # type: ignore[override]
        assert question.n == 1
        yield from self.texts

    def ask_samples(self, question: PingQuestion) -> PingSamples:
        assert question.n == len(self.texts)
        return PingSamples(self.texts, num_tokens=100, seconds=0.5)


def test_one_answer_comes_in_pieces() -> None:
    out = io.StringIO()
    ask(Answers(["a", "b"]), PingQuestion(prompt="x"), out)
    assert out.getvalue() == "ab\n"


def test_many_samples_vote() -> None:
    out = io.StringIO()
    ask(Answers([" 1 + 1 = 2\n#### 2", "#### 3", "#### 2", "#### 2"]), PingQuestion(prompt="x", n=4), out)
    assert out.getvalue().splitlines() == [
        *("sample 1", "  1 + 1 = 2", "  #### 2", "sample 2", "  #### 3", "sample 3", "  #### 2", ""),
        "vote   2: 3 of 4 samples",
        "others 3: 1",
        "speed  4 samples, 100 tokens in 0.50 s: 200 tokens/s",
    ]


def test_a_terminal_says_that_it_waits() -> None:
    out = Terminal()
    ask(Answers(["2", "2"]), PingQuestion(prompt="x", n=2), out)
    assert out.getvalue().startswith("asking for 2 samples …\r\x1b[Ksample 1\n")


def test_a_tie_is_said_to_be_one() -> None:
    lines = list(sample_lines(PingSamples(["4", "5", ""], 3, 0.0), width=80))
    assert "vote   4: 1 of 3 samples, as many for 5, (none)" in lines
    assert "others 5: 1, (none): 1" in lines


def test_long_samples_are_cut_and_wrapped() -> None:
    samples = PingSamples(["start " + "word " * 1000 + "end", "", "x"], 3, 1.0)
    lines = list(sample_lines(samples, width=40))
    assert max(map(len, lines[:-3])) <= 40
    assert max(map(len, lines)) <= 80
    assert len(lines) < 30
    assert lines[1].startswith("  start word")
    assert any(line.endswith("end") for line in lines)
