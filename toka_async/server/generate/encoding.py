"""Texts to token ids, most in threads: the event loop stays free, and memory has a bound however many texts there are.

The library takes about 250 bytes for each byte of what it tokenizes at once, until it is through. So texts are
tokenized a group at a time, in two lanes: long ones, and lists of many, are in no short one's way. Knows texts and the
tokenizer; how long a text may be is for its callers to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import numpy as np

from toka_async.arrays import Int32
from toka_async.server.generate.batching import Batcher
from toka_async.text.tokenizer import Tokenizer

GROUP = 1 << 18  # characters that are tokenized at once, if they are of more than one text
LONG = GROUP  # characters of texts for which others should not wait
SHORT = 4096  # characters that take the event loop two or three milliseconds

Item = tuple[str, bool]  # a text; whether special tokens are added


class TextEncoder:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._short: Batcher[Item, Int32] = Batcher(self._encode_all, executor, is_short)
        self._long: Batcher[Item, Int32] = Batcher(self._encode_all, executor)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[Int32]:
        """Token ids [t] of each text, perhaps none."""
        lane = self._long if sum(map(len, texts)) > LONG else self._short
        return await lane.run([(text, add_special_tokens) for text in texts])

    def _encode_all(self, items: list[Item]) -> list[Int32]:
        ids: list[Int32] = [np.empty(0, np.int32)] * len(items)
        for add_special_tokens in {special for _, special in items}:
            places = [place for place, (_, special) in enumerate(items) if special is add_special_tokens]
            for group in groups([len(items[place][0]) for place in places]):
                chosen = places[group]
                encoded = self._tokenizer.encode_batch([items[place][0] for place in chosen], add_special_tokens)
                for place, each in zip(chosen, encoded, strict=True):
                    ids[place] = np.array(each, np.int32)
        return ids


def is_short(items: Sequence[Item]) -> bool:
    return sum(len(text) for text, _ in items) <= SHORT


def groups(lengths: Sequence[int]) -> Iterator[slice]:
    """Consecutive texts, as many as have GROUP characters together; one at least."""
    start, num_chars = 0, 0
    for place, length in enumerate(lengths):
        if place > start and num_chars + length > GROUP:
            yield slice(start, place)
            start, num_chars = place, 0
        num_chars += length
    if lengths:
        yield slice(start, len(lengths))
