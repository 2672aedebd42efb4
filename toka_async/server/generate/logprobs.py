"""Log-probs as responses show them: the lists of completions, the objects of chat, vLLM's `prompt_logprobs`.

Those of new tokens are made of lists, as a stream gets one token or a few at a time. Knows tokens, their scores and
names.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
import numpy as np
from msgspec.structs import replace

from toka_async.arrays import Float32, Int32, as_f32, as_i32
from toka_async.messages import Prefilled
from toka_async.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PackedLogprobs,
    PackedPrompt,
    PackedTokens,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from toka_async.server.engine.token_block import Score, TokenRows
from toka_async.text.detokenize import Detokenizer
from toka_async.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON has not; as in OpenAI's API


def numbers(values: Float32) -> list[float]:
    return np.maximum(values, np.float32(LEAST)).tolist()  # type: ignore[no-any-return]


class TokenNames(dict[int, str]):
    """What tokens are called in the log-probs of completions, by token id; a name is made when its token is first seen.

    as_ids: `token_id:5`, for clients that have to tell all tokens apart.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.as_ids = as_ids

    def __missing__(self, token_id: int) -> str:
        name = self[token_id] = f"token_id:{token_id}" if self.as_ids else legacy_name(self.tokenizer, token_id)
        return name


class ChatNames(dict[int, tuple[str, tuple[int, ...]]]):
    """A token's name in the log-probs of chats and its bytes, by token id, as `TokenNames`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.as_ids = as_ids

    def __missing__(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        name = f"token_id:{token_id}" if self.as_ids else self.tokenizer.token_text(token_id)
        entry = self[token_id] = name, tuple(self.tokenizer.token_bytes(token_id))
        return entry


def legacy_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's name in completions: its text, or `bytes:\\xe4\\xb8` for a part of a character, as OpenAI's."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def legacy_logprobs(
    names: TokenNames, token_ids: Sequence[int], scores: Sequence[Score], offsets: Sequence[int], num_top: int
) -> CompletionLogprobs:
    """`logprobs` of a completion's tokens; the chosen one is in `top_logprobs` in any case.

    Args:
        offsets: where each token begins in the choice's text.
        num_top: how many of the likeliest the request wants.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, score in zip(token_ids, scores, strict=True):
        name, (own, top_ids, values) = names[token_id], shown_score(token_id, score, num_top)
        entry = dict(zip(map(names.__getitem__, top_ids), values, strict=True))
        if len(entry) < len(values):  # tokens share a name: the likeliest keeps it
            entry = {}
            for top_id, value in zip(top_ids, values, strict=True):
                entry.setdefault(names[top_id], value)
        entry.setdefault(name, own)
        tokens.append(name)
        logprobs.append(own)
        top.append(entry)
    return CompletionLogprobs(tokens=tokens, token_logprobs=logprobs, top_logprobs=top, text_offset=list(offsets))


def shown_score(token_id: int, score: Score, num_top: int) -> Score:
    """A token's log-prob, and `num_top` of the likeliest tokens with theirs, likeliest first.

    Among these the token has exactly its own log-prob: clients compare the two.
    """
    logprob, top_ids, values = score
    own, top_ids, values = max(logprob, LEAST), top_ids[:num_top], values[:num_top]
    if values and values[-1] < LEAST:  # the smallest
        values = [max(value, LEAST) for value in values]
    if token_id in top_ids:
        values[top_ids.index(token_id)] = own
    return own, top_ids, values


def likeliest(rows: TokenRows, num_top: int) -> Iterator[list[tuple[int, float]]]:
    """The likeliest tokens at each place with their log-probs, as `shown_score` shows them."""
    for token_id, score in zip(rows.token_ids.tolist(), rows.list_scores(), strict=True):
        _, top_ids, values = shown_score(token_id, score, num_top)
        yield list(zip(top_ids, values, strict=True))


def prompt_rows(prompt: Int32, prefilled: Prefilled, width: int) -> TokenRows:
    """The prompt's tokens but the first, with the log-probs that the engine sent; `width` likeliest ones each."""
    num = len(prompt) - 1
    return TokenRows(
        prompt[1:],
        as_f32(prefilled.logprobs),
        as_i32(prefilled.top_ids).reshape(num, width),
        as_f32(prefilled.top_logprobs).reshape(num, width),
    )


def echoed_logprobs(
    names: TokenNames, first_id: int, rows: TokenRows, offsets: Sequence[int], num_top: int
) -> CompletionLogprobs:
    """`legacy_logprobs` of an echoed prompt, whose first token has no log-prob. `offsets` are of all its tokens."""
    rest = legacy_logprobs(names, rows.token_ids.tolist(), rows.list_scores(), offsets[1:], num_top)
    return CompletionLogprobs(
        tokens=[names[first_id], *rest.tokens],
        token_logprobs=[None, *rest.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs],
        text_offset=list(offsets),
    )


Lists = tuple[bytes, ...]  # the four lists of a CompletionLogprobs as JSON, without brackets


def json_lists(logprobs: CompletionLogprobs) -> Lists:
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    return tuple(msgspec.json.encode(each)[1:-1] for each in lists)


def concatenated(first: Lists, then: CompletionLogprobs | None) -> msgspec.Raw:
    """An echoed prompt's log-probs, which all samples share, and those of a completion."""
    lists = first
    if then is not None and then.tokens:
        lists = tuple(b"%b,%b" % pair for pair in zip(first, json_lists(then), strict=True))
    return msgspec.Raw(b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % lists)


class TokenLengths(dict[int, int]):
    """Characters of the text of each token of a sample, by token id; -1 where it is not whole characters.

    A length is found when its token is first seen.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._pieces = tokenizer.pieces.shown if skip_special_tokens else tokenizer.pieces.rest

    def __missing__(self, token_id: int) -> int:
        try:
            length = len(self._pieces[token_id].decode())
        except UnicodeDecodeError:
            length = -1
        self[token_id] = length
        return length


def sample_offsets(lengths: TokenLengths, ids: Sequence[int], start: int = 0) -> list[int]:
    """Where each token of a sample begins in the text of all; `start` is where the text begins."""
    sizes = list(map(lengths.__getitem__, ids))
    if -1 in sizes:
        return text_offsets(lengths.tokenizer, ids, lengths.skip_special_tokens, continues=True, start=start)
    return list(accumulate(sizes[:-1], initial=start)) if sizes else []


def text_offsets(
    tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool, continues: bool, start: int = 0
) -> list[int]:
    """Where each token begins in the text of all; `start` is where the text begins."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens, continues)
    offsets = []
    for token_id in ids:
        offsets.append(start)
        start += len(detokenizer.push((token_id,)))
    return offsets


def chat_logprobs(names: ChatNames, token_ids: Sequence[int], scores: Sequence[Score], num_top: int) -> ChatLogprobs:
    """`logprobs` of a chat's tokens."""
    content: list[TokenLogprob] = []
    for token_id, score in zip(token_ids, scores, strict=True):
        (name, raw), (own, top_ids, values) = names[token_id], shown_score(token_id, score, num_top)
        top: list[TopLogprob] = []
        for top_id, value in zip(top_ids, values, strict=True):
            top_name, top_raw = names[top_id]
            top.append(TopLogprob(token=top_name, logprob=value, bytes=top_raw))
        content.append(TokenLogprob(token=name, logprob=own, bytes=raw, top_logprobs=top))
    return ChatLogprobs(content=content)


def packed_logprobs(samples: Sequence[TokenRows], num_top: int) -> str:
    """`system_fingerprint` of a response whose log-probs are packed; `samples` in the order of choices."""
    tops = [(rows.top_ids[:, :num_top], rows.top_logprobs[:, :num_top]) for rows in samples] if num_top > 0 else None
    packed = PackedLogprobs(
        completion_ids=[rows.token_ids.tolist() for rows in samples],
        packed_chosen_logprobs=[base64_of(rows.logprobs) for rows in samples],
        packed_topk_indices=None if tops is None else [base64_of(ids) for ids, _ in tops],
        packed_topk_logprobs=None if tops is None else [base64_of(values) for _, values in tops],
    )
    return msgspec.json.encode(packed).decode()


def pack_tokens(rows: TokenRows, num_top: int) -> PackedTokens:
    """`packed_logprobs` of a sample, or of what is new of it; `num_top` of the likeliest tokens at each place."""
    packed = PackedTokens(token_ids=base64_of(rows.token_ids), logprobs=base64_of(rows.logprobs), num_top=num_top)
    if num_top:
        ids, values = base64_of(rows.top_ids[:, :num_top]), base64_of(rows.top_logprobs[:, :num_top])
        packed = replace(packed, top_ids=ids, top_logprobs=values)
    return replace(packed, kept=base64_of(rows.kept), masses=base64_of(rows.masses)) if rows.kept.size else packed


def pack_prompt(rows: TokenRows, ranks: Int32, num_top: int) -> PackedPrompt:
    """`packed_prompt_logprobs`. rows: the prompt's tokens but the first. ranks: of these among all."""
    packed = PackedPrompt(logprobs=base64_of(rows.logprobs), ranks=base64_of(ranks), num_top=num_top)
    if not num_top:
        return packed
    ids, values = base64_of(rows.top_ids[:, :num_top]), base64_of(rows.top_logprobs[:, :num_top])
    return replace(packed, top_ids=ids, top_logprobs=values)


def base64_of(values: Float32 | Int32) -> str:
    return b64encode(values.tobytes()).decode()


def prompt_logprobs(tokenizer: Tokenizer, rows: TokenRows, ranks: Int32, num_top: int) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: an entry a prompt token, null for the first; token id -> log-prob, rank and text.

    Args:
        rows: the prompt's tokens but the first. ranks: of these among all.
    """
    entries: PromptLogprobs = [None]
    columns = (rows.token_ids.tolist(), numbers(rows.logprobs), ranks.tolist(), likeliest(rows, num_top))
    for token_id, logprob, own_rank, tops in zip(*columns, strict=True):
        # Its own entry comes first, as vLLM's: clients read that one.
        entry = {str(token_id): PromptLogprob(logprob, own_rank, tokenizer.token_text(token_id))}
        for rank, (top_id, value) in enumerate(tops, start=1):
            entry[str(top_id)] = PromptLogprob(value, rank, tokenizer.token_text(top_id))
        entries.append(entry)
    return entries
