"""Events made of many rows at once are, byte for byte, those of a definition; whole texts those of each sample."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.cases import tokenizers as small
from tests.cases.requests import make_block, make_tokens
from toka_async.config import AuthConfig, LimitsConfig
from toka_async.messages import Reason, ToScheduler
from toka_async.openai.generation import Defaults, RequestLimits, chat_generation, completion_generation
from toka_async.openai.requests import ChatRequest, CompletionRequest, StreamOptions
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.request_group import RequestGroup
from toka_async.server.engine.token_block import TokenRows, merge_blocks
from toka_async.server.generate.answers import new_header
from toka_async.server.generate.block_texts import MANY, BlockTexts
from toka_async.server.generate.chat import ChatAnswer
from toka_async.server.generate.completions import CompletionAnswer
from toka_async.server.generate.events import StreamEvents, event
from toka_async.server.generate.sample_text import SampleStream, TextOptions, sample_text
from toka_async.server.generate.service import Run, Service, stop_token, text_options
from toka_async.server.limits.accounts import Accounts
from toka_async.text.stop import StopStrings
from toka_async.text.tokenizer import Tokenizer
from toka_async.transport.codec import Codec
from toka_async.transport.local import LocalChannel

N = 4
BUILDERS = [small.byte_level, small.byte_fallback, small.metaspace]
Answer = CompletionAnswer | ChatAnswer
Arrivals = list[tuple[int, list[int], Reason]]  # sample, token ids, reason
Streams = dict[int, SampleStream | None]


def make(
    tokenizer: Tokenizer,
    end: int,
    flags: list[bool],
    stops: list[str],
    n: int = N,
    more: dict[str, Any] | None = None,
) -> tuple[Service, Run, Answer]:
    """A streamed request of n samples with `more` fields, and what answers it."""
    chat, usage, kept, skip, ids = flags
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
        "n": n,
        "stream": True,
        "stream_options": StreamOptions(include_usage=usage),
        "stop_token_ids": [end],
        "include_stop_str_in_output": kept,
        "skip_special_tokens": skip,
        "return_token_ids": ids,
        "stop": stops,
        "min_tokens": len(stops),
        **(more or {}),
    }
    answer: Answer
    if chat:
        generation = chat_generation(ChatRequest(messages=[], **fields), limits, Defaults())
        answer = ChatAnswer(service, new_header("chatcmpl", service.name))
    else:
        request = CompletionRequest(prompt="x", echo=True, **fields)
        generation = completion_generation(request, limits, Defaults())
        answer = CompletionAnswer(service, ["x"], new_header("cmpl", service.name))
    group = RequestGroup(1, n, stream=True)
    return service, Run(generation, [np.array([1], np.int32)], text_options(generation), group), answer


def plain_events(
    service: Service, run: Run, answer: Answer, arrivals: Arrivals, streams: Streams, due: set[int]
) -> list[bytes]:
    """The definition: a chunk for what each sample's tokens add, where that is something; samples begin in order.

    Log-probs are those of `score_each`.

    due: samples whose first chunk has the prompt.
    """
    generation, events = run.generation, []
    num_logprobs = generation.sampling.num_logprobs
    for sample, ids, reason in sorted(arrivals):
        made: list[tuple[int, Any]] = []
        for each in range(sample + 1):
            if each not in streams:
                streams[each] = SampleStream(service.tokenizer, run.options)
                made.append((each, answer.first(run, 0, each)))
        stream = streams[sample]
        assert stream is not None or not made
        if stream is None:
            continue  # a stop string has ended it
        piece = stream.push(score_each(make_tokens(ids), num_logprobs), reason)
        stop: str | int | None = stop_token(generation, piece.rows, reason)
        if piece.stop is not None:
            reason, stop, streams[sample] = Reason.STOP_STRING, piece.stop, None
        if reason or piece.text or ((generation.return_token_ids or num_logprobs >= 0) and len(piece.rows)):
            made += [(sample, each) for each in answer.chunks(run, 0, sample, piece, reason, stop)]
        for each, chunk in made:
            if chunk is not None:
                events.append(event(answer.with_prompt(chunk, run, 0) if each in due else chunk))
                due.discard(each)
    return events


def score_each(rows: TokenRows, num_logprobs: int) -> TokenRows:
    """The rows with log-probs that depend on the tokens alone; the chosen token is among the likeliest or not."""
    if num_logprobs < 0:
        return rows
    ids = rows.token_ids[:, None]
    top_ids = (ids + ids % 2 + np.arange(num_logprobs)) % 250
    top_logprobs = -np.arange(num_logprobs, dtype=np.float32) - ids / 100
    top_logprobs[rows.token_ids % 3 == 0, -1:] = -np.inf
    return replace(
        rows,
        logprobs=(-rows.token_ids / 90).astype(np.float32),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top_logprobs.astype(np.float32),
    )


def wish_logprobs(is_chat: bool, num_logprobs: int | None) -> dict[str, Any]:
    """The fields of a request with so many of the likeliest tokens."""
    if num_logprobs is None:
        return {}
    return {"logprobs": True, "top_logprobs": num_logprobs} if is_chat else {"logprobs": num_logprobs}


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("num_logprobs", [None, 0, 3])
@pytest.mark.parametrize("seed", range(40))
def test_events_are_those_of_the_definition(
    build: Callable[[], Tokenizer], seed: int, num_logprobs: int | None
) -> None:
    tokenizer, random = build(), Random(seed)
    end = random.randrange(tokenizer.vocab_size)
    rows = [[random.randrange(tokenizer.vocab_size + 3) for _ in range(random.randint(1, 12))] for _ in range(N)]
    stops = [tokenizer.decode(rows[0][:4], continues=True)[:2] or "x", "e"] if random.random() < 0.5 else []
    flags = [random.random() < 0.5 for _ in range(5)]
    flags[4] = flags[4] and num_logprobs is None  # ids in every chunk: these are made one by one
    service, run, answer = make(tokenizer, end, flags, stops, more=wish_logprobs(flags[0], num_logprobs))
    told: list[tuple[int, int, int]] = []
    service.engine.requests.end_sample = lambda *arguments: told.append(arguments)  # type: ignore[method-assign]
    reasons = [random.choice([Reason.STOP, Reason.LENGTH]) for _ in range(N)]
    for row in rows:
        row[-1] = random.choice([end, row[-1]])
    events, streams = StreamEvents(service, run, answer), Streams()
    due = set(range(N)) if run.generation.return_token_ids else set()
    while any(rows):
        arrivals: Arrivals = []
        for sample in random.sample(range(N), N):
            count = random.randint(0, 3)
            new, rows[sample] = rows[sample][:count], rows[sample][count:]
            if new:
                arrivals.append((sample, new, Reason.NONE if rows[sample] else reasons[sample]))
        if arrivals:
            block = merge_blocks([make_block(arrivals)], N)
            block = replace(block, tokens=score_each(block.tokens, -1 if num_logprobs is None else num_logprobs))
            assert events.take(block) == b"".join(plain_events(service, run, answer, arrivals, streams, due))
    assert events.num_open == 0
    assert len(told) == len({sample for _, sample, _ in told}) <= sum(stream is None for stream in streams.values())
    stopped = {sample: num_tokens for _, sample, num_tokens in told}
    assert all(events.num_tokens >= num_tokens for num_tokens in stopped.values())


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("seed", range(40))
def test_events_of_lists_are_those_of_columns(build: Callable[[], Tokenizer], seed: int) -> None:
    """Characters of several tokens too, which columns begin and lists end, or the other way round."""
    tokenizer, random = build(), Random(seed)
    flags = [random.random() < 0.5 for _ in range(5)]
    num_logprobs = random.choice([None, None, 0, 1, 3])
    more = wish_logprobs(flags[0], num_logprobs)
    arrivals = [[random.randrange(tokenizer.vocab_size) for _ in range(random.randint(1, 3))] for _ in range(30)]
    service, run, answer = make(tokenizer, tokenizer.vocab_size + 1, flags, [], 1, more)
    by_lists, by_columns = StreamEvents(service, run, answer), StreamEvents(service, run, answer)
    assert by_lists.takes_lists
    for number, ids in enumerate(arrivals):
        block = make_block([(0, ids, Reason.NONE)])
        if num_logprobs is not None:
            block = replace(block, tokens=score(ids, num_logprobs, random), num_logprobs=num_logprobs)
        takes_lists = number > 0 and random.random() < 0.7  # the first tokens come in columns
        scores = block.tokens.list_scores()
        assert len(scores) == (0 if num_logprobs is None else len(ids))
        assert (by_lists.take_lists(ids, scores) if takes_lists else by_lists.take(block)) == by_columns.take(block)
        assert by_lists.num_tokens == by_columns.num_tokens
    last = make_block([(0, [1], Reason.LENGTH)])
    if num_logprobs is not None:
        last = replace(last, tokens=score([1], num_logprobs, random), num_logprobs=num_logprobs)
    assert by_lists.take(last) == by_columns.take(last)


def score(ids: list[int], num_logprobs: int, random: Random) -> TokenRows:
    """Tokens with log-probs as an engine sends them."""
    draw = np.random.default_rng(random.randrange(1 << 30))
    top_ids = draw.integers(0, 200, (len(ids), num_logprobs)).astype(np.int32)
    top_logprobs = -draw.exponential(size=top_ids.shape).astype(np.float32)
    return TokenRows(
        np.array(ids, np.int32), -draw.exponential(size=len(ids)).astype(np.float32), top_ids, top_logprobs
    )


def test_events_of_several_samples_stops_and_versions_need_columns() -> None:
    tokenizer, flags = small.byte_level(), [False] * 5
    cases: list[tuple[int, list[str], dict[str, Any]]] = [
        (2, [], {}),
        (1, ["x"], {}),
        (1, [], {"return_weight_versions": True}),
    ]
    for n, stops, more in cases:
        assert not StreamEvents(*make(tokenizer, 1, flags, stops, n, more)).takes_lists


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
    texts = BlockTexts(tokenizer).texts(make_block(list(zip(range(5), rows, reasons, strict=True))), options)
    for text, row, reason in zip(texts, rows, reasons, strict=True):
        count = options.num_text_tokens(make_tokens(row), reason)
        assert text == sample_text(tokenizer, row[:count], options)
    assert any(text.stop for text in texts) or stops is None or num_tokens == 5
