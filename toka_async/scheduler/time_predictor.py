"""Predicts how long steps take on the ranks, and learns from how long they took.

A step's time is taken to be a constant, and so much for each token, for each key that decoding rows read, and for each
pair of a prompt's token and a key before it. Learning is gradient descent on the squared logarithm of measured over
predicted time, in the logarithms of the four costs, with a normalised step (NLMS; Widrow and Hoff 1960, Nagumo and Noda
1967). So costs stay positive, need no scale, and each changes by its share of the prediction: steps of one kind
teach little of others. Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

UNMEASURED = 200e-6  # seconds of a token, where the ranks did not measure it
# The first guess of the other costs, in tokens: what a weight's bytes, a key's and a product of the two cost on GPUs.
CONSTANT = 256.0
KEY = 1 / 1024
PAIR = 1 / 16384
GAIN = 0.25  # share of an error that a step corrects
LARGEST_ERROR = 4.0  # factor that one step may teach; it may take long for reasons of its own
# Bounds of a token's cost, as shares of the measured one. Beyond them, other costs explain a step's time: without
# bounds, many small steps of one size would teach that a token costs nothing, or all.
CHEAPEST, DEAREST = 0.75, 1.5


@dataclass(slots=True)
class StepWork:
    """What a step computes.

    tokens: of decoding rows and of prompts. keys: that decoding rows read; a group's prefix counts once. pairs: of a
    prompt's token and a key before it.
    """

    tokens: int
    keys: int
    pairs: float = 0.0


class TimePredictor:
    """The costs of a step's parts, in seconds. token_seconds: of a large step, as ranks measured it; 0: they did not.

    Attributes:
        constant, token, key, pair: the costs.
    """

    def __init__(self, token_seconds: float = 0.0) -> None:
        self.token = token_seconds or UNMEASURED
        self.constant = CONSTANT * self.token
        self.key = KEY * self.token
        self.pair = PAIR * self.token
        self._bounds = (CHEAPEST * token_seconds, DEAREST * token_seconds or 1.0)

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """Seconds of a step, of a token, of a key and of a pair, as `messages.STEP_COSTS`."""
        return self.constant, self.token, self.key, self.pair

    def predict(self, work: StepWork) -> float:
        """Predict a step's seconds."""
        return self.constant + self.token * work.tokens + self.key * work.keys + self.pair * work.pairs

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`; 0: it was not timed."""
        if seconds <= 0.0:
            return
        constant, token = self.constant, self.token * work.tokens
        key, pair = self.key * work.keys, self.pair * work.pairs
        predicted = constant + token + key + pair
        error = log(min(max(seconds / predicted, 1.0 / LARGEST_ERROR), LARGEST_ERROR))
        squares = constant * constant + token * token + key * key + pair * pair
        change = GAIN * error * predicted / squares
        self.constant *= exp(change * constant)
        least, most = self._bounds
        self.token = min(max(self.token * exp(change * token), least), most)
        self.key *= exp(change * key)
        self.pair *= exp(change * pair)

    def count_tokens(self, seconds: float, start: int = 0) -> int:
        """Count the tokens of a prompt, after `start` of its tokens, that take as long as that."""
        first = self.token + self.pair * start
        return int(2.0 * seconds / (first + sqrt(first * first + 2.0 * self.pair * seconds)))
