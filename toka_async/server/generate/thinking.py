"""Bounds the thoughts of requests whose prompts are given as they are, by a grammar of their whole outputs.

A chat knows from its template how its answer begins. Of other requests the prompts' token ids show whether they have
begun a thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from toka_async.arrays import Int32
from toka_async.openai.errors import bad_request
from toka_async.openai.generation import GenerationParams
from toka_async.openai.structured import check_installed
from toka_async.text.formats.choice import ResponseFormat
from toka_async.text.formats.output_grammar import GrammarTokens, Thought, UnwritableError
from toka_async.text.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"


def find_budget(budget: int | None, known: ResponseFormat | None) -> int | None:
    """The most tokens of a thought; None: any number. Raises ApiError: 400 where no thought is known, 501."""
    if budget is None or budget < 0:
        return None
    if known is None or known.thought is None:
        why = "the model is not known to think; set model.reasoning_format, or leave it out"
        raise bad_request(f"'{BUDGET}': {why}", param=BUDGET, code="unsupported_parameter")
    check_installed(BUDGET)
    return budget


def bound_thoughts(
    generation: GenerationParams,
    prompts: Sequence[Int32],
    known: ResponseFormat | None,
    tokenizer: Tokenizer,
    end_ids: Sequence[int],
) -> GenerationParams:
    """Lets outputs begin with a thought of so many tokens at most; the rest is what it was.

    Tokens of a thought that a prompt has begun count.

    Raises ApiError: 400 for a model without thoughts, or where the prompts' outputs would need grammars of their own.
    """
    budget = find_budget(generation.thinking_budget, known)
    if budget is None:
        return generation
    if len(generation.sampling.allowed_ids):
        name = "allowed_token_ids"
        raise bad_request(f"'{name}' and '{BUDGET}': no token may be left that both allow; give one", param=name)
    assert known is not None
    assert known.thought is not None
    begun = {count_thought(each, known.thought, tokenizer) for each in prompts}
    if len(begun) > 1:
        raise bad_request(
            f"'{BUDGET}': the prompts differ in how much of a thought they have begun; send them one by one",
            param=BUDGET,
            code="unsupported_parameter",
        )
    (num_begun,) = begun
    written = "" if num_begun is None else known.thought.opening
    left = max(0, budget - (num_begun or 0))
    tokens = GrammarTokens(tokenizer.backend.token_to_id, frozenset(end_ids))
    content = generation.sampling.grammar
    try:
        grammar = known.write_answer(tokens, written, content=content, calls=None, budget=left)
    except UnwritableError as error:
        raise bad_request(f"'{BUDGET}': {error}", param=BUDGET, code="unsupported_parameter") from None
    sampling = structs.replace(generation.sampling, grammar=grammar)
    return replace(generation, sampling=sampling, grammar_param=generation.grammar_param or BUDGET)


def count_thought(prompt: Int32, thought: Thought, tokenizer: Tokenizer) -> int | None:
    """Counts the tokens of the thought that a prompt [p] has begun and not ended; None if there is no such thought."""
    opening, closing = (tokenizer.encode(text, False) for text in (thought.opening, thought.closing))
    start, end = find_last(prompt, opening), find_last(prompt, closing)
    return prompt.size - start - len(opening) if start > end else None


def count_written(ids: Sequence[int], thought: Thought, tokenizer: Tokenizer, *, is_open: bool) -> int | None:
    """Counts the tokens of the thoughts in an output, without their marks; None where no token shows them.

    is_open: the prompt has begun one.
    """
    *before, mark = thought.opening_parts  # what is before the last mark may be written in any tokens
    last, closing = map(tokenizer.backend.token_to_id, (mark, thought.closing))
    if last is None or closing is None:
        return None
    count, start = 0, 0 if is_open else None
    for place, token_id in enumerate(ids):
        if start is not None and token_id == closing:
            count, start = count + place - start, None
            if not before:
                break  # such thoughts are at an answer's start alone
        elif start is None and token_id == last:
            window = ids[max(0, place + 1 - len(thought.opening)) : place + 1]
            start = place + 1 if tokenizer.decode(window, False).endswith(thought.opening) else None
    return count + (0 if start is None else len(ids) - start) or None


def find_last(ids: Int32, wanted: Sequence[int]) -> int:
    """Finds the last place of some ids, one after the other, in others [p]; -1 if there is none."""
    if ids.size < len(wanted):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(wanted))
    places = np.flatnonzero((windows == np.asarray(wanted, np.int32)).all(axis=1))
    return int(places[-1]) if places.size else -1
