"""The same requests to this model and to lm_eval's `hf`, which runs transformers. Needs lm_eval and accelerate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toka_async.evaluation.__main__ import main

DEMO = Path(__file__).parents[3] / "toka_async/demo"
QUESTIONS = [f"Question: Ben has {i} apples. He buys {i + 3} more. How many has he?\nAnswer:" for i in range(2, 12)]

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that lm_eval loads


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main() == 2
    assert "pip install 'toka-async[evaluation]'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any]]:
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    from toka_async.evaluation.lm_eval_model import TokaLM

    ours = TokaLM("demo", max_length=200)
    yield ours, HFLM(pretrained=str(DEMO), device="cpu", dtype="float32", max_length=200)
    ours.llm.shutdown()


def ask(kind: str, model: Any, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return list(getattr(model, kind)([Instance(kind, {}, each, 0) for each in arguments], disable_tqdm=True))


def test_log_likelihoods(models: tuple[Any, Any]) -> None:
    pairs = [(question, f" Ben has {i} apples.\n#### {i}") for i, question in enumerate(QUESTIONS)]
    pairs += [("", "Ben has 4 apples."), ("Ben has ", "4 apples."), ("".join(QUESTIONS), " 5")]
    ours, theirs = (ask("loglikelihood", model, *pairs) for model in models)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_greedy_continuations_are_recognized(models: tuple[Any, Any]) -> None:
    (text,) = ask("generate_until", models[0], (QUESTIONS[0], {"until": ["\n"], "max_gen_toks": 20}))
    assert [greedy for _, greedy in ask("loglikelihood", models[0], (QUESTIONS[0], text))] == [True]


def test_whole_texts(models: tuple[Any, Any]) -> None:
    """Also longer than the context."""
    texts = [("".join(QUESTIONS[:count]),) for count in (1, 2, 10)]
    ours, theirs = (ask("loglikelihood_rolling", model, *texts) for model in models)
    assert ours == pytest.approx(theirs, abs=1e-2)


def test_generated_texts(models: tuple[Any, Any]) -> None:
    """Also with stop strings and of a context that is cut."""
    settings = {"until": ["Question:", "\n\n"], "max_gen_toks": 60, "do_sample": False}
    asked = [(question, settings) for question in QUESTIONS]
    asked += [(QUESTIONS[0], {"until": ["####"], "max_gen_toks": 90}), ("".join(QUESTIONS), settings)]
    ours, theirs = (ask("generate_until", model, *asked) for model in models)
    assert ours == theirs


def test_chats(models: tuple[Any, Any]) -> None:
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    ours, theirs = (model.apply_chat_template(chat) for model in models)
    assert ours == theirs
    assert QUESTIONS[0] in ours


def test_an_unknown_argument_is_named(models: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        ask("generate_until", models[0], (QUESTIONS[0], {"until": [], "num_beams": 4}))
