"""Requests in columns, and what comes back of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from toka_async.arrays import Int32
from toka_async.messages import Reason, TokenSampling
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.request_columns import RequestColumns
from toka_async.server.engine.request_group import RequestGroup
from toka_async.server.engine.token_block import NO_LOGPROBS, TokenBlock, TokenRows


def make_requests(
    *prompts: Int32,
    keys: Sequence[int] | None = None,
    n: int = 1,
    max_tokens: int | Sequence[int] = 3,
    stream: bool = False,
    stop_id: int = -1,
) -> RequestColumns:
    """One request a prompt; keys are 0, 1, … unless they are given."""
    given = np.arange(len(prompts)) if keys is None else np.asarray(keys, np.int64)
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    return RequestColumns(
        keys=given,
        lengths=np.asarray([prompt.size for prompt in prompts], np.int32),
        prompts=np.concatenate(prompts),
        seeds=given + 1,
        max_tokens=np.asarray(most, np.int64),
        n=n,
        sampling=TokenSampling(),
        stream=stream,
        priority=0,
        stop_id=stop_id,
    )


@asynccontextmanager
async def run_group(
    engine: Engine, requests: RequestColumns, timeout: float = 0.0, waited: float = 0.0
) -> AsyncIterator[RequestGroup]:
    """Requests that run in an engine."""
    group = RequestGroup(len(requests), requests.n, requests.stream)
    async with engine.running(requests, group, timeout, waited):
        yield group


def make_prompt(first: int = 0, length: int = 4) -> Int32:
    return np.arange(first, first + length, dtype=np.int32)


def make_tokens(ids: Sequence[int]) -> TokenRows:
    """Tokens without log-probs."""
    return TokenRows(np.asarray(ids, np.int32), *NO_LOGPROBS)


def make_block(arrivals: Sequence[tuple[int, Sequence[int], Reason]], key: int = 0) -> TokenBlock:
    """New tokens of some samples of one request: sample, token ids, reason."""
    rows = [[key, sample, len(ids), reason, 7, 0, reason != 0, 0] for sample, ids, reason in arrivals]
    tokens = make_tokens([token_id for _, ids, _ in arrivals for token_id in ids])
    return TokenBlock(np.asarray(rows, np.int64).T, tokens)


def tokens_by_sample(block: TokenBlock) -> dict[tuple[int, int], list[int]]:
    """Token ids by key and sample."""
    rows = np.split(block.tokens.token_ids, np.cumsum(block.counts)[:-1])
    places = zip(block.keys.tolist(), block.samples.tolist(), strict=True)
    return {place: row.tolist() for place, row in zip(places, rows, strict=True)}
