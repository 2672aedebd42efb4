"""Counts the final answers of a question's samples.

Knows how models mark an answer; knows neither servers nor terminals.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

MARKED = re.compile(r"####[ \t]*(\S[^\n]*)")
MOST_DIGITS = 30  # before or after the point; longer numbers stay as written
BOX = r"\boxed{"
NUMBER = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?(?!\w)")


def find_answer(text: str) -> str:
    """Find a text's answer: after `####`, in `\\boxed{}`, its last number, or its last line; "" for an empty text.

    Equal numbers are written alike.
    """
    if marked := MARKED.findall(text):
        return _normalize(marked[-1])
    if BOX in text:
        return _normalize(_find_boxed(text))
    if numbers := NUMBER.findall(text):
        return _normalize(numbers[-1])
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def count_answers(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Count (answer, samples that have it), the most frequent first; among equals the one that came first."""
    return Counter(map(find_answer, texts)).most_common()


def _find_boxed(text: str) -> str:
    """The content of the last box, its braces matched."""
    content = text[text.rindex(BOX) + len(BOX) :]
    depth = 1
    for index, character in enumerate(content):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content[:index]
    return content


def _normalize(answer: str) -> str:
    answer = answer.strip().rstrip(".").strip()
    try:
        number = Decimal(answer.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return answer
    if not number.is_finite() or abs(number.adjusted()) > MOST_DIGITS:
        return answer
    return f"{number.quantize(Decimal(1)):f}" if number == number.to_integral_value() else f"{number.normalize():f}"
