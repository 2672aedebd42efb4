"""Small cores for tests: a few slots and pages, a simulated rank, and what a request must get. Knows messages only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from tests.drivers.core import CoreDriver, CoreOptions, Received
from tests.drivers.page_rank import PageRank, expected
from toka_async.arrays import as_i32
from toka_async.messages import Ready, Step

VOCAB = 23


class SmallCore(CoreDriver):
    """A driver whose simulated rank can be looked at; it admits while pages are free unless told otherwise."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        max_seqs: int = 8,
        max_tokens: int = 32,
        until_full: bool = True,
        **options: Unpack[CoreOptions],
    ) -> None:
        ready = Ready(num_pages=num_pages, page_size=page_size, max_seqs=max_seqs, max_context=4096, vocab_size=VOCAB)
        self.pages = PageRank(ready)
        super().__init__(ready, max_tokens=max_tokens, rank=self.pages, until_full=until_full, **options)

    def turn_until(self, reached: Callable[[], object]) -> None:
        """Turns until that is true."""
        for _ in range(1000):
            if reached():
                return
            assert self.turn(), "nothing moves"
        raise AssertionError("it does not get there")


def wanted(received: Received) -> list[list[int]]:
    """The tokens of a request's samples, computed without pages."""
    message = received.submit
    ends = set(as_i32(message.sampling.end_ids).tolist())
    prompt = as_i32(message.prompt)
    return [expected(prompt, message.seed, i, message.max_tokens, ends, VOCAB) for i in range(message.n)]


def got(received: Received) -> list[list[int]]:
    """The tokens that arrived of a request's samples."""
    return [sample.token_ids for sample in received.samples]


def built(core: SmallCore) -> Step:
    """The one step that is queued now."""
    core.build()
    (step,) = core.queued
    return step
