"""Server-sent events of a streamed request: the rows that have come for a connection at once.

Events of a sample whose request wants text and log-probs at most differ in these alone. So each is its sample's prefix,
the text as JSON, log-probs if they are wanted, and a suffix, and the text of a token that is whole characters is looked
up. All other events are made as chunks, one by one. Knows no HTTP; knows nothing of which API the answer belongs to.
"""

from __future__ import annotations

import secrets
from itertools import accumulate
from typing import Protocol

import msgspec
from msgspec.structs import replace

from toka_async.messages import Reason
from toka_async.openai.errors import ErrorResponse
from toka_async.server.engine.token_block import NO_ROWS, REASONS, Score, TokenBlock, rows_of_lists
from toka_async.server.generate.answers import Answer, run_usage, sample_usage, wants_tokens
from toka_async.server.generate.block_texts import JsonTexts
from toka_async.server.generate.sample_text import Piece, StreamedTexts
from toka_async.server.generate.service import Run, Service, stop_token

ENCODER = msgspec.json.Encoder()
PADDED = 32  # bytes, of which a text with its padding has a multiple
DONE = b"data: [DONE]\n\n"
NO_REQUEST = -1  # in place of a request's id: only stop strings, which end samples early, need it
MARK = "\0text\0"  # no id and no model's name has it
MOST_TOKENS = 1024  # that become events in one turn of the event loop
MOST_PLAIN_TOKENS = 64 * MOST_TOKENS  # of requests whose texts are looked up: they are so much cheaper


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + ENCODER.encode(data) + b"\n\n"


def encode_text(text: str) -> bytes:
    """A text as JSON, without the quotes."""
    return ENCODER.encode(text)[1:-1]


def padding(text: str) -> str:
    """Random characters, so many that who sees an encrypted chunk's size does not see the length of its text."""
    count = PADDED - len(ENCODER.encode(text)) % PADDED
    return secrets.token_urlsafe(count)[:count]


class EventSource(Protocol):
    """The events of one request."""

    @property
    def most_tokens(self) -> int:
        """To be given at once, or a few more."""
        ...

    @property
    def num_open(self) -> int:
        """Samples that have not ended."""
        ...

    def take(self, block: TokenBlock) -> bytes:
        """The events of new tokens."""
        ...

    @property
    def takes_lists(self) -> bool:
        """Whether `take_lists` can be called once `take` was."""
        ...

    def take_lists(self, token_ids: list[int], scores: list[Score], /) -> bytes:
        """The events of further tokens of the only sample, which has not ended, after `take` has begun it.

        scores: one for each token, or none where no log-probs were asked for.
        """
        ...

    def finish(self) -> bytes:
        """The events at the end."""
        ...

    def fail(self, error: ErrorResponse) -> bytes:
        """The events at an end that is too early."""
        ...


class StreamEvents:
    """The events of one request as chunks of its answer."""

    def __init__(self, service: Service, run: Run, answer: Answer) -> None:
        generation, num_prompts = run.generation, len(run.prompts)
        self._run = run
        self._answer = answer
        self._n = generation.n
        self._wants_versions = generation.return_weight_versions
        self._wants_tokens = wants_tokens(generation)
        no_logprobs = answer.chunk_logprobs(run, 0, [], [], [])
        self._has_logprobs = no_logprobs is not None
        self._no_logprobs = ENCODER.encode(no_logprobs)
        made_one_by_one = generation.usage_in_chunks or generation.pad_chunks or generation.is_parsed
        wants_more = generation.return_token_ids or generation.return_weight_versions
        packs_logprobs = generation.sampling.num_logprobs >= 0 and not self._has_logprobs
        self._is_plain = not (wants_more or packs_logprobs or made_one_by_one)
        tokenizer = service.marking_tokenizer if generation.is_parsed else service.tokenizer
        self._samples = StreamedTexts(
            tokenizer, run.options, num_prompts, generation.n, service.engine.requests.end_sample
        )
        self._texts = service.json_texts[run.options.skip_special_tokens]
        self._lengths = service.token_lengths[run.options.skip_special_tokens]
        self._has_stops = run.options.stops is not None
        if self._is_plain and run.options.stops is not None:
            firsts = run.options.stops.automaton.firsts
            self._texts = JsonTexts(service.tokenizer, run.options.skip_special_tokens, firsts)
        self._num_begun = [0] * num_prompts
        self._prefixes: list[bytes | None] = [None] * (num_prompts * generation.n)
        self._middle = self._suffix = b""  # what an event has after its text: before and after its log-probs
        self._prompts_due = {*range(len(self._prefixes))} if generation.return_token_ids else set()
        is_cheap = self._is_plain and not (self._has_stops or self._has_logprobs)
        self.most_tokens = MOST_PLAIN_TOKENS if is_cheap else MOST_TOKENS

    @property
    def num_open(self) -> int:
        """See EventSource."""
        return self._samples.num_open

    @property
    def num_tokens(self) -> int:
        """Tokens kept so far."""
        return sum(self._samples.num_tokens)

    def take(self, block: TokenBlock) -> bytes:
        """See EventSource."""
        parts: list[bytes] = []
        block = block.with_versions() if self._wants_versions else block
        if self._is_plain:
            self._add_texts(parts, block)
        else:
            for row, piece, reason in self._samples.pieces(block):
                if self._prefixes[row] is None:
                    self._begin(parts, row)
                self._add_piece(parts, row, piece, reason)
        return b"".join(parts)

    @property
    def takes_lists(self) -> bool:
        """See EventSource."""
        return len(self._prefixes) == 1 and not (self._has_stops or self._wants_versions)

    def take_lists(self, token_ids: list[int], scores: list[Score]) -> bytes:
        """See EventSource."""
        samples, text = self._samples, None
        if self._is_plain and 0 not in samples.open:
            text = join_texts([self._texts[token_id] for token_id in token_ids])
        if not self._is_plain or (self._has_logprobs and not text):
            parts: list[bytes] = []
            piece, reason = samples.push(0, rows_of_lists(token_ids, scores), Reason.NONE, NO_REQUEST)
            self._add_piece(parts, 0, piece, reason)
            return b"".join(parts)
        if text is None:
            text = encode_text(samples.push_plain(0, token_ids))
        else:
            samples.num_tokens[0] += len(token_ids)
        (prefix,) = self._prefixes
        assert prefix is not None
        if self._has_logprobs:
            return prefix + text + self._middle + self._encode_logprobs(0, token_ids, scores) + self._suffix
        return prefix + text + self._suffix if text else b""

    def finish(self) -> bytes:
        """See EventSource."""
        if not self._run.generation.include_usage:
            return DONE
        return event(self._answer.last(run_usage(self._run, self.num_tokens))) + DONE

    def fail(self, error: ErrorResponse) -> bytes:
        """See EventSource."""
        return event(error)

    def _add_texts(self, parts: list[bytes], block: TokenBlock) -> None:
        """Append what new tokens of a request say that wants text and log-probs at most."""
        samples, prefixes = self._samples, self._prefixes
        num_tokens, is_open, stopped = samples.num_tokens, samples.open, samples.stopped
        ids, scores = block.tokens.token_ids.tolist(), block.tokens.list_scores()
        texts = list(map(self._texts.__getitem__, ids))
        makes_pieces = self._has_stops or self._has_logprobs
        start = 0
        for row, count, number, request_id in samples.rows(block):
            end = start + count
            prefix = prefixes[row] or self._begin(parts, row)
            text = join_texts(texts[start:end])
            if stopped and row in stopped:
                text = None
            elif number or (makes_pieces and (not text or row in is_open)):
                piece, reason = samples.push(row, block.tokens.part(start, end), REASONS[number], request_id)
                text = encode_text(piece.text)
                if reason or self._has_logprobs:
                    self._add_piece(parts, row, piece, reason)
                    text = None
            elif text is None or row in is_open:
                text = encode_text(samples.push_plain(row, ids[start:end]))
            else:
                num_tokens[row] += count
            if text and self._has_logprobs:
                logprobs = self._encode_logprobs(row, ids[start:end], scores[start:end])
                parts += (prefix, text, self._middle, logprobs, self._suffix)
            elif text:
                parts += (prefix, text, self._suffix)
            start = end

    def _encode_logprobs(self, row: int, token_ids: list[int], scores: list[Score]) -> bytes:
        """What tokens of whole characters say beside their text."""
        num_chars = self._samples.num_chars
        offsets = list(accumulate(map(self._lengths.__getitem__, token_ids), initial=num_chars[row]))
        num_chars[row] = offsets.pop()
        return ENCODER.encode(self._answer.chunk_logprobs(self._run, row // self._n, token_ids, scores, offsets))

    def _begin(self, parts: list[bytes], row: int) -> bytes:
        """Append the first chunks of the sample and of those before it; returns the prefix of its events, if plain.

        Samples begin in their order, because OpenAI's client takes them in no other.
        """
        prompt, sample = divmod(row, self._n)
        prefix = b""
        while self._num_begun[prompt] <= sample:
            each = prompt * self._n + self._num_begun[prompt]
            self._num_begun[prompt] += 1
            prefix = self._begin_sample(parts, each)
        return prefix

    def _begin_sample(self, parts: list[bytes], row: int) -> bytes:
        prompt, sample = divmod(row, self._n)
        first = self._answer.first(self._run, prompt, sample)
        if first is not None:
            parts.append(event(self._complete(first, row, 0, "")))
        prefix = b""
        if self._is_plain:
            (chunk,) = self._answer.chunks(self._run, prompt, sample, Piece(MARK, NO_ROWS, []), Reason.NONE, None)
            prefix, _, self._suffix = event(chunk).partition(encode_text(MARK))
            if self._has_logprobs:
                self._middle, _, self._suffix = self._suffix.partition(self._no_logprobs)
        self._prefixes[row] = prefix
        return prefix

    def _add_piece(self, parts: list[bytes], row: int, piece: Piece, reason: Reason) -> None:
        """Append the chunks of what new tokens add, if that is anything."""
        if reason or piece.text or (self._wants_tokens and len(piece.rows)):
            self._add_chunks(parts, row, piece, reason)

    def _add_chunks(self, parts: list[bytes], row: int, piece: Piece, reason: Reason) -> None:
        prompt, sample = divmod(row, self._n)
        stop = piece.stop if piece.stop is not None else stop_token(self._run.generation, piece.rows, reason)
        for chunk in self._answer.chunks(self._run, prompt, sample, piece, reason, stop):
            parts.append(event(self._complete(chunk, row, self._samples.num_tokens[row], piece.text)))

    def _complete(self, chunk: msgspec.Struct, row: int, num_tokens: int, text: str) -> msgspec.Struct:
        """A chunk with this text, and what the request wants in every chunk, or in a sample's first one."""
        generation, prompt = self._run.generation, row // self._n
        if generation.usage_in_chunks:
            chunk = replace(chunk, usage=sample_usage(self._run, prompt, num_tokens))
        if generation.pad_chunks:
            chunk = replace(chunk, obfuscation=padding(text))
        if row in self._prompts_due:
            self._prompts_due.remove(row)
            chunk = self._answer.with_prompt(chunk, self._run, prompt)
        return chunk


def join_texts(texts: list[bytes | None]) -> bytes | None:
    """The texts of several tokens together; None where one is not whole characters."""
    if len(texts) == 1:
        return texts[0]
    return None if None in texts else b"".join(text for text in texts if text is not None)
