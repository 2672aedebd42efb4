"""Requests that one caller waits for together: what has come of them, and a way to wait for more.

Tokens stay columns of many samples. Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from toka_async.arrays import Int32, Int64
from toka_async.messages import Prefilled
from toka_async.server.engine.token_block import Score, TokenBlock, join_sample, merge_blocks


class RequestFailedError(Exception):
    """The engine refused the request; the message says why."""


class TimedOutError(RequestFailedError):
    """The request took longer than it may."""


def timed_out(timeout: float) -> TimedOutError:
    return TimedOutError(f"it took longer than limits.request_timeout ({timeout:g} s)")


class EngineStoppedError(Exception):
    """The engine is gone, and with it the requests that it held."""


class RequestGroup:
    """The sink of requests whose caller takes tokens when it is ready for them. Keys are 0, 1, … by prompt.

    Args:
        n: samples of each prompt.
        stream: tokens are wanted as they come.

    Attributes:
        num_samples: of all prompts.
        num_tokens: of all samples, as they came.
        num_cached: [prompts], prompt tokens that were found in the cache.
        prefilled: by prompt, where log-probs of prompts are wanted.
        error: why it ended early.
        receive: called with a single sample's next tokens and their scores, if any, as soon as they come. It returns
            whether it has taken them; if not, `news` gives them.
    """

    account = None

    def __init__(self, num_prompts: int, n: int, stream: bool) -> None:
        self.n = n
        self.stream = stream
        self.num_tokens = 0
        self.num_cached: Int32 = np.zeros(num_prompts, np.int32)
        self.prefilled: dict[int, Prefilled] = {}
        self.error: Exception | None = None
        self.receive: Callable[[list[int], list[Score]], bool] | None = None
        self.num_samples = self._num_open = num_prompts * n
        self._blocks: list[TokenBlock] = []
        self._rest: TokenBlock | None = None  # of what was merged, and was too much to be taken at once
        self._news = asyncio.Event()

    # ---- the sink ----------------------------------------------------------------------------------------------------

    @property
    def takes_offers(self) -> bool:
        """See Sink."""
        return self.receive is not None

    def on_tokens(self, block: TokenBlock) -> None:
        """See Sink."""
        if not self.num_tokens or self.num_cached.size > 1:  # all blocks of a prompt say the same
            self.num_cached[block.keys] = block.cached
        self._blocks.append(block)
        self.num_tokens += len(block.tokens)
        self._num_open -= int(np.count_nonzero(block.reasons))
        if self.stream or not self._num_open:
            self._news.set()

    def offer(self, token_ids: list[int], scores: list[Score]) -> bool:
        """See Sink. Refuses tokens while earlier ones wait for `news`, or `receive` refuses them."""
        if self.receive is None or self._blocks or self._rest is not None or not self.receive(token_ids, scores):
            return False
        self.num_tokens += len(token_ids)
        return True

    def on_prompt(self, key: int, prefilled: Prefilled) -> None:
        """See Sink."""
        self.prefilled[key] = prefilled

    def on_failed(self, _keys: Int64, error: Exception) -> None:
        """See Sink. One error ends the whole group."""
        self.error = self.error or error
        self._news.set()

    def forget(self, keys: Int64) -> bool:
        """See Sink. Nobody has taken anything yet of requests that are not streamed."""
        if self.stream:
            return False
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            dropped = np.isin(block.keys, keys)
            self._num_open += int(np.count_nonzero(block.reasons[dropped]))
            if not dropped.all():
                self._blocks.append(block.take(np.flatnonzero(~dropped)))
        self.num_tokens = sum(len(block.tokens) for block in self._blocks)
        return True

    # ---- the caller --------------------------------------------------------------------------------------------------

    async def news(self, most_tokens: int) -> TokenBlock:
        """Waits for new tokens: those of samples that have some, each sample once, however much has come.

        Where a slow client has let much come together it is some of them, `most_tokens` or a few more, and others have
        their turn of the event loop before the rest.

        Raises:
            RequestFailedError, EngineStoppedError: one of the requests will get no more.
        """
        if self._blocks or self._rest:
            await asyncio.sleep(0)
        while not (self._blocks or self._rest):
            await self._wait()
        block, self._rest = self._rest or self._merge(), None
        if len(block.tokens) > most_tokens:
            num_rows = int(np.searchsorted(np.cumsum(block.counts), most_tokens)) + 1
            if num_rows < len(block):
                block, self._rest = block.part(0, num_rows), block.part(num_rows, len(block))
        return block

    async def finished(self) -> TokenBlock:
        """Waits until every sample has ended; all of them.

        Raises:
            RequestFailedError, EngineStoppedError: one of the requests ended otherwise.
        """
        while self._num_open or self.error is not None:
            await self._wait()
        return self._merge()

    def check(self) -> None:
        """Raises RequestFailedError or EngineStoppedError: one of them will get no more."""
        if self.error is not None:
            raise self.error

    def _merge(self) -> TokenBlock:
        # A stream that lags behind joins blocks most of the time, and most streams have one sample.
        block = join_sample(self._blocks) if self.num_samples == 1 else merge_blocks(self._blocks, self.n)
        self._blocks.clear()
        return block

    async def _wait(self) -> None:
        self.check()
        self._news.clear()
        await self._news.wait()
