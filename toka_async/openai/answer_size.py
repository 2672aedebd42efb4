"""Bounds how large an answer can become before its request runs: some kilobytes can ask for gigabytes.

Generated text is not counted, because generating it takes far longer than sending it. Repeated prompts (text and token
ids) and log-probs are counted. Knows requests; knows no text and no engine.
"""

from __future__ import annotations

from toka_async.openai.errors import bad_request
from toka_async.openai.generation import GenerationParams

ENTRY_BYTES = 48  # a token with its log-prob as JSON: about 30 in completions, 80 in chats
PACKED_BYTES = 24  # a token in arrays in base64: its id, log-prob and rank, or what filters keep
CHAR_BYTES = 4  # a character that an echo repeats
ID_BYTES = 8  # a token id as JSON


def check_answer_size(
    generation: GenerationParams, num_prompt: int, max_new: int, num_echoed: int, max_mb: int
) -> None:
    """Raises ApiError (400) if the answer could exceed `max_mb` MiB.

    num_prompt: prompt tokens. max_new: tokens of all samples together. num_echoed: prompt characters in the answer.
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
    """Returns an upper estimate. Streamed samples are not counted: their log-probs leave as they arrive."""
    sampling, copies = generation.sampling, generation.num_prompt_copies
    num_entries, num_ids = 0, copies * num_prompt if generation.return_token_ids else 0
    if generation.echo and sampling.num_logprobs >= 0:
        num_entries += copies * num_prompt * (1 + sampling.num_logprobs)
    if generation.num_prompt_logprobs >= 0:
        num_entries += copies * num_prompt * (1 + generation.num_prompt_logprobs)
    if sampling.num_logprobs >= 0 and not generation.stream:
        num_entries += max_new * (1 + sampling.num_logprobs)
    each = PACKED_BYTES if generation.pack_columns else ENTRY_BYTES
    return each * num_entries + CHAR_BYTES * copies * num_echoed + ID_BYTES * num_ids
