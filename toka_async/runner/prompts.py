"""What a rank keeps of the prompts its rows compute or continue.

Knows no slots and no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toka_async.arrays import Float32, Int32, as_f32, as_i32
from toka_async.messages import Prompt
from toka_async.model.sampling import Params, params_of


@dataclass(slots=True, frozen=True, eq=False)
class RowPrompt:
    """A prompt, shared by the rows admitted with its key; it lives as long as one of them, or as its key.

    token_ids: int32 [p]. num_prompt: leading ids that are the user's. pages: int32, full pages shared by the rows.
    params: sampling parameters, PARAMS [1]. end_ids, bias_ids, allowed_ids: int32, ids of the vocabulary only. bias:
    float32.
    """

    token_ids: Int32
    num_prompt: int
    pages: Int32
    params: Params
    num_prompt_logprobs: int
    end_ids: Int32
    bias_ids: Int32
    bias: Float32
    allowed_ids: Int32


def read_prompt(prompt: Prompt, vocab_size: int) -> RowPrompt:
    """Copies, so that the received message can go. Ids outside the vocabulary have no logit: they are left out."""
    sampling = prompt.sampling
    end_ids, bias_ids = as_i32(sampling.end_ids), as_i32(sampling.bias_ids)
    allowed_ids = as_i32(sampling.allowed_ids)
    valid = (bias_ids >= 0) & (bias_ids < vocab_size)
    return RowPrompt(
        token_ids=as_i32(prompt.token_ids).copy(),
        num_prompt=prompt.num_prompt,
        pages=as_i32(prompt.pages).copy(),
        params=params_of(sampling),
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        end_ids=np.unique(end_ids[(end_ids >= 0) & (end_ids < vocab_size)]),
        bias_ids=bias_ids[valid],
        bias=as_f32(sampling.bias_values)[valid],
        allowed_ids=np.unique(allowed_ids[(allowed_ids >= 0) & (allowed_ids < vocab_size)]),
    )
