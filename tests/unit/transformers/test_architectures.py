from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toka_async.transformers.architectures import find_problem


@pytest.mark.parametrize(
    ("model_type", "problem"),
    [
        ("cohere", ""),
        ("gpt_neox", ""),
        ("bloom", "no attention interface"),
        ("mamba", "keep a state"),
        ("bart", "encoder-decoder"),
        ("bert", "unless its configuration sets is_decoder"),
        ("llama4", "parts beside text"),
        ("roberta", "which tokens are padding"),
    ],
)
def test_why_no_model_of_a_type_can_run(model_type: str, problem: str) -> None:
    found = find_problem(model_type, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]))
    assert (problem in found) if problem else not found
