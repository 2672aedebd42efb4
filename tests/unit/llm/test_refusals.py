from __future__ import annotations

import pytest

from toka_async.llm.refusals import check_arguments, explain_missing


def test_arguments_that_ask_for_nothing_are_taken() -> None:
    check_arguments({"lora_request": None, "tokenization_kwargs": {}, "chat_template_content_format": "auto"})


def test_others_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"lora_request: .*merge"):
        check_arguments({"lora_request": object()})
    with pytest.raises(TypeError, match="'use_tdqm'"):
        check_arguments({"use_tdqm": False})


def test_methods_that_only_vllm_has_are_explained() -> None:
    assert "AsyncLLM" in explain_missing("LLM", "enqueue")
    assert "prompt_logprobs" in explain_missing("LLM", "score")
    assert explain_missing("LLM", "generat") == "'LLM' object has no attribute 'generat'"
    assert explain_missing("AsyncLLM", "add_lora").startswith("AsyncLLM.add_lora: LoRA adapters")
