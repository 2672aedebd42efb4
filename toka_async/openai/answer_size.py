"""How large an answer can become, before its request runs: some kilobytes can ask for gigabytes.

Text that is generated counts for nothing, as generating it takes so much longer than sending it. What repeats the
prompt (its text, its token ids), and log-probs, count. Knows requests; knows no text and no engine.
"""

from __future__ import annotations

from toka_async.openai.errors import bad_request
from toka_async.openai.generation import GenerationParams

ENTRY_BYTES = 48  # of a token with its log-prob as JSON: in completions some 30, in chats some 80
CHAR_BYTES = 4  # of a character that an echo repeats
ID_BYTES = 8  # of a token id as JSON


def check_answer_size(
    generation: GenerationParams, num_prompt: int, max_new: int, num_echoed: int, max_mb: int
) -> None:
    """Raises ApiError (400) for a request whose answer could have more than `max_mb` MiB.

    Args:
        num_prompt: tokens of its prompts.
        max_new: tokens that its samples can have together.
        num_echoed: characters of the prompts, if they are echoed.
    """
    num_bytes = answer_bytes(generation, num_prompt, max_new, num_echoed)
    if num_bytes <= max_mb << 20:
        return
    of_samples = generation.sampling.num_logprobs >= 0 and max_new > 0 and not generation.stream
    what = "n, logprobs or max_tokens, or stream it" if of_samples else "n, or do not ask for the prompt's tokens"
    raise bad_request(
        f"the answer could have {num_bytes >> 20} MiB of log-probs and repeated prompts (n={generation.n}); "
        f"limits.max_answer_mb is {max_mb}. Lower {what}",
        param="n" if generation.n > 1 else "prompt" if num_prompt > max_new else "max_tokens",
        code="answer_too_large",
    )


def answer_bytes(generation: GenerationParams, num_prompt: int, max_new: int, num_echoed: int) -> int:
    """An estimate from above. Streamed samples count for nothing: their log-probs go out as they come."""
    sampling, copies = generation.sampling, generation.num_prompt_copies
    num_entries, num_ids = 0, copies * num_prompt if generation.return_token_ids else 0
    if generation.echo and sampling.num_logprobs >= 0:
        num_entries += copies * num_prompt * (1 + sampling.num_logprobs)
    if generation.num_prompt_logprobs >= 0:
        num_entries += copies * num_prompt * (1 + generation.num_prompt_logprobs)
    if sampling.num_logprobs >= 0 and not generation.stream:
        num_entries += max_new * (1 + sampling.num_logprobs)
    return ENTRY_BYTES * num_entries + CHAR_BYTES * copies * num_echoed + ID_BYTES * num_ids
