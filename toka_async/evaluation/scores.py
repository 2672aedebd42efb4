"""What lm_eval asks for, in terms of `toka_async.LLM`: the ends of prompts, sums of log-probs, sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toka_async.llm.outputs import Logprob

ELSEWHERE = {"do_sample", "until", "max_gen_toks"}  # of the arguments, that are no sampling parameters


def cut_context(context: Sequence[int], continuation: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
    """Keep the last `max_tokens` tokens of both; returns them and how many are of the context, at least one.

    A first token has no log-prob, so it always counts as context.
    """
    tokens = [*context, *continuation][-max_tokens:]
    return tokens, max(len(tokens) - len(continuation), 1)


def sum_logprobs(
    tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None], num_context: int
) -> tuple[float, bool]:
    """Sum the log-probs of the tokens after the context.

    Args:
        logprobs: of each token itself and at least the likeliest token in its place.

    Returns:
        The sum, and whether each token is the likeliest in its place.
    """
    total, is_greedy = 0.0, True
    for token, entry in zip(tokens[num_context:], logprobs[num_context:], strict=True):
        assert entry is not None
        own = entry[token].logprob
        total += own
        is_greedy = is_greedy and own >= max(each.logprob for each in entry.values())
    return total, is_greedy


def make_sampling(generation: Mapping[str, Any], max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
    """Make sampling parameters of normalized generation arguments, which are greedy without a temperature. Unknown ones
    stay: the engine names them.

    stop: without the empty strings that tasks may have.
    """
    sampling = {name: value for name, value in generation.items() if name not in ELSEWHERE}
    return {"temperature": 0.0} | sampling | {"max_tokens": max_tokens, "stop": [text for text in stop if text]}
