"""How much of prompts a step computes: as many tokens as there is memory for, and as its time allows.

A step that computes prompts should not take longer than a limit: rows that decode get no token meanwhile. If decoding
takes most of that time, prompts still get a share of the step, so that they move on. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from toka_async.scheduler.time_predictor import StepWork, TimePredictor

UNLIMITED = 1e6  # seconds
SHARE = 0.25  # of the time of decoding, that prompts may take at least


@dataclass(slots=True, frozen=True)
class StepLimits:
    """How long a step that computes prompts may take, in seconds; `streaming`: while somebody reads a stream.

    decodings: a step beside streams takes at most so many times what it takes without prompts, where costs that do not
    depend on its size count half. Smaller steps would cost throughput, the more the more rows decode, and in larger
    ones the first prompts wait for the last. least_tokens: of prompts, that a step has time for beyond the limit, as
    far as they take no longer than those costs.
    """

    seconds: float = UNLIMITED
    streaming: float = UNLIMITED
    decodings: float = UNLIMITED
    least_tokens: int = 256


@dataclass(slots=True)
class StepBudget:
    """What a step has room for beside its decoding rows: tokens, and seconds for those of prompts."""

    predictor: TimePredictor
    limits: StepLimits
    tokens: int
    seconds: float = 0.0
    least: float = 0.0  # seconds that prompts may take at any rate

    def allow_prompts(self, decoding: StepWork, is_streaming: bool) -> None:
        """Allow prompts to take the time that decoding leaves, and a least part of the step in any case."""
        limits, spent = self.limits, self.predictor.predict(decoding)
        beside_streams = min(limits.streaming, limits.decodings * (spent - self.predictor.constant / 2))
        left = (beside_streams if is_streaming else limits.seconds) - spent
        # Smaller steps would spend most of their time on those costs. On a slow device the tokens alone may take longer
        # than the limit.
        self.least = min(limits.least_tokens * self.predictor.token, self.predictor.constant)
        self.seconds = max(left, SHARE * spent, self.least)

    @property
    def has_room(self) -> bool:
        """Whether a chunk of a prompt fits that is worth beginning."""
        return self.tokens > 0 and self.seconds > self.least / 8

    def count_tokens(self) -> int:
        """Count the tokens that fit of a prompt's beginning."""
        return min(self.tokens, self.predictor.count_tokens(self.seconds))

    def take_chunk(self, start: int, wanted: int) -> int:
        """Take as much as fits of a prompt's next `wanted` tokens, after its first `start`; returns how many.

        It is at least one while there is room, and none otherwise.
        """
        if not self.has_room:
            return 0
        count = min(wanted, self.tokens, max(self.predictor.count_tokens(self.seconds, start), 1))
        self._spend(count, count_pairs(start, count))
        return count

    def take_rows(self, count: int) -> None:
        """Take rows that start to decode."""
        self._spend(count, 0.0)

    def _spend(self, tokens: int, pairs: float) -> None:
        self.tokens -= tokens
        self.seconds -= self.predictor.token * tokens + self.predictor.pair * pairs


def count_pairs(start: int, count: int) -> float:
    """Count the pairs of a chunk's token and a key before it, where the chunk follows `start` tokens."""
    return count * (start + count / 2)
