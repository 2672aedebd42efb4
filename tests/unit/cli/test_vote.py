from __future__ import annotations

import pytest

from toka_async.cli.vote import count_answers, find_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("21 + 18 = 39.\n#### 30", "30"),
        ("#### 1,234.50\n", "1234.5"),
        ("#### 30.0", "30"),
        ("####  $7.", "7"),
        ("#### two", "two"),
        (r"so \boxed{12} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"cut off: \boxed{\frac{1}{2", r"\frac{1}{2"),
        ("It is 3, no, 1,200.", "1200"),
        ("between -4 and -5", "-5"),
        ("in 2b or not", "in 2b or not"),
        ("It depends.\n\nYes\n", "Yes"),
        ("", ""),
        ("  \n", ""),
        ("#### 1e999999999", "1e999999999"),
        ("#### NaN", "NaN"),
    ],
)
def test_the_final_answer(text: str, answer: str) -> None:
    assert find_answer(text) == answer


def test_the_most_frequent_answer_is_first() -> None:
    assert count_answers(["#### 5", "so 4", "4.0", "#### 5", "4", "?"]) == [("4", 3), ("5", 2), ("?", 1)]
