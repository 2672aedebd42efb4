"""Events made of many rows at once are, byte for byte, those made sample by sample; so are whole texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.cases import tokenizers as small
from toka_async.config import AuthConfig, LimitsConfig
from toka_async.messages import Reason, ToScheduler
from toka_async.openai.generation import Defaults, RequestLimits, chat_generation, completion_generation
from toka_async.openai.requests import ChatRequest, CompletionRequest, StreamOptions
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.inflight import InFlight, RequestGroup
from toka_async.server.engine.rows import TokenBlock, token_rows
from toka_async.server.generate.answers import new_header
from toka_async.server.generate.block_texts import MANY, BlockTexts
from toka_async.server.generate.chat import ChatAnswer
from toka_async.server.generate.completions import CompletionAnswer
from toka_async.server.generate.events import SampleEvents
from toka_async.server.generate.sample_text import TextOptions, sample_text
from toka_async.server.generate.service import Run, Service, in_blocks, text_options
from toka_async.server.generate.text_events import TextEvents
from toka_async.server.limits.accounts import Accounts
from toka_async.text.stop import StopStrings
from toka_async.text.tokenizer import Tokenizer
from toka_async.transport.codec import Codec
from toka_async.transport.local import LocalChannel

N = 4
BUILDERS = [small.byte_level, small.byte_fallback, small.metaspace]
Answer = CompletionAnswer | ChatAnswer


def make(tokenizer: Tokenizer, end: int, flags: list[bool]) -> tuple[Service, Run, Answer]:
    """A streamed request of N samples, and what answers it."""
    chat, usage, kept, skip = flags
    engine = Engine([LocalChannel[ToScheduler](Codec(ToScheduler))], 8)
    service = Service(
        LimitsConfig(),
        'a "model"',
        tokenizer,
        None,
        Defaults(),
        engine,
        ThreadPoolExecutor(1),
        Accounts(LimitsConfig(), AuthConfig()),
    )
    limits = RequestLimits(max_context=100, cache_tokens=100, vocab_size=1000, max_n=8)
    fields: dict[str, Any] = {
        "n": N,
        "stream": True,
        "stream_options": StreamOptions(include_usage=usage),
        "stop_token_ids": [end],
        "include_stop_str_in_output": kept,
        "skip_special_tokens": skip,
    }
    answer: Answer
    if chat:
        generation = chat_generation(ChatRequest(messages=[], **fields), limits, Defaults())
        answer = ChatAnswer(service, new_header("chatcmpl", service.name))
    else:
        request = CompletionRequest(prompt="x", echo=True, **fields)
        generation = completion_generation(request, limits, Defaults())
        answer = CompletionAnswer(service, ["x"], new_header("cmpl", service.name))
    assert in_blocks(generation)
    return service, Run(generation, [np.array([1], np.int32)], text_options(generation), RequestGroup()), answer


def by_index(events: bytes) -> list[bytes]:
    """The events in the order of their samples, each sample's in its own order."""
    parts = events.split(b"\n\n")[:-1]
    return sorted(parts, key=lambda part: json.loads(part[6:])["choices"][0]["index"])


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("seed", range(20))
def test_as_sample_by_sample(build: Callable[[], Tokenizer], seed: int) -> None:
    tokenizer, random = build(), Random(seed)
    end = random.randrange(tokenizer.vocab_size)
    service, run, answer = make(tokenizer, end, [random.random() < 0.5 for _ in range(4)])
    rows = [[random.randrange(tokenizer.vocab_size + 3) for _ in range(random.randint(1, 12))] for _ in range(N)]
    reasons = [random.choice([Reason.STOP, Reason.LENGTH]) for _ in range(N)]
    for row in rows:
        row[-1] = random.choice([end, row[-1]])
    single = InFlight(RequestGroup(), 0, 1, N, True, 0.0)
    many = InFlight(run.batch, 0, 1, N, True, 0.0, in_blocks=True)
    alone, together = SampleEvents(service, run, answer), TextEvents(service, run, answer)
    while any(rows):
        arrivals = []
        for sample in random.sample(range(N), N):
            count = random.randint(0, 3)
            new, rows[sample] = rows[sample][:count], rows[sample][count:]
            if new:
                arrivals.append((sample, new, Reason.NONE if rows[sample] else reasons[sample]))
        if not arrivals:
            continue
        for sample, new, reason in arrivals:
            single.add(sample, token_rows(np.array(new, np.int32)), reason)
        many.add_block(block(arrivals))
        if random.random() < 0.5 or not any(rows):  # else the client is slow
            fresh = [(single, i) for i in range(N) if single.samples[i].parts]
            assert by_index(together.take([(many, 0)])) == by_index(alone.take(fresh))
            assert (together.num_open, together.num_tokens) == (alone.num_open, alone.num_tokens)
    assert together.num_open == 0


def block(arrivals: list[tuple[int, list[int], Reason]]) -> TokenBlock:
    return TokenBlock(
        np.array([sample for sample, _, _ in arrivals], np.int32),
        np.array([len(new) for _, new, _ in arrivals], np.int32),
        np.array([i for _, new, _ in arrivals for i in new], np.int32),
        np.array([int(reason) for _, _, reason in arrivals], np.int32),
    )


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("num_tokens", [5, MANY])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("keep_ends", [False, True])
@pytest.mark.parametrize("stops", [None, StopStrings(["answer", "é"]), StopStrings(["\ufffd", "an"], include=True)])
def test_whole_texts(
    build: Callable[[], Tokenizer], num_tokens: int, skip: bool, keep_ends: bool, stops: StopStrings | None
) -> None:
    tokenizer, random = build(), np.random.default_rng(num_tokens)
    rows = [random.integers(0, tokenizer.vocab_size + 3, count).tolist() for count in (num_tokens, 1, 0, 7, 7)]
    reasons = [Reason.STOP, Reason.STOP, Reason.LENGTH, Reason.LENGTH, Reason.STOP]
    options = TextOptions(skip_special_tokens=skip, stops=stops, min_tokens=3, keep_ends=keep_ends)
    texts = BlockTexts(tokenizer).texts(block(list(zip(range(5), rows, reasons, strict=True))), options)
    for text, row, reason in zip(texts, rows, reasons, strict=True):
        count = options.num_text_tokens(token_rows(np.array(row, np.int32)), reason)
        assert text == sample_text(tokenizer, row[:count], options)
    assert any(text.stop for text in texts) or stops is None or num_tokens == 5
