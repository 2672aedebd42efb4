"""The demo model's files, its tokenizer and chat template, and the problems that it was trained on.

It knows what is in the package folder and in ``scripts/demo_problems.py``. It does not run the network: how often the
model is right is measured by ``scripts/train_demo_model.py`` and stated in the model card, and the engine's own tests
load the model.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any, cast

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "toka_async" / "demo"


problems = load_script("demo_problems")


def _json(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((DEMO / name).read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def _take(count: int, seed: int = 7, held_out: bool = True) -> list[Any]:
    return list(itertools.islice(problems.generate(seed, held_out=held_out), count))


def _render(messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(_json("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_the_weights_fit_the_configuration_and_have_one_to_four_million_parameters() -> None:
    config = _json("config.json")
    shapes: dict[str, list[int]] = {}
    with safe_open(str(DEMO / "model.safetensors"), framework="np") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            stored = weights.get_slice(name)
            assert stored.get_dtype() == "BF16"
            shapes[name] = stored.get_shape()
    count = 0
    for shape in shapes.values():
        size = 1
        for side in shape:
            size *= side
        count += size
    assert 1_000_000 <= count <= 4_000_000
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["model_type"] == "qwen2"
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in shapes
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = hidden // config["num_attention_heads"]
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], hidden]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [head * config["num_key_value_heads"], hidden]
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == [head * config["num_key_value_heads"]]
    assert f"model.layers.{layers - 1}.mlp.down_proj.weight" in shapes
    assert f"model.layers.{layers}.mlp.down_proj.weight" not in shapes
    assert config["max_position_embeddings"] >= 1024


def test_the_end_tokens_are_the_same_everywhere(tokenizer: Tokenizer) -> None:
    ends = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")]
    assert _json("generation_config.json")["eos_token_id"] == ends
    assert _json("config.json")["eos_token_id"] == ends[0]
    assert _json("tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    assert tokenizer.get_vocab_size() == _json("config.json")["vocab_size"]


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n  two\t spaces \r\n", "汤姆有12个苹果。", "naïve 🙂👩‍👩‍👧 #### -3", "don't: x = (1/2)*3;"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_problems_survive_the_tokenizer_with_one_token_for_each_digit(tokenizer: Tokenizer) -> None:
    for problem in _take(50):
        text = problem.prompt + problem.completion + "<|endoftext|>"
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
        assert encoded.ids[-1] == tokenizer.token_to_id("<|endoftext|>")
        assert sum(token.isdigit() for token in encoded.tokens) == sum(character.isdigit() for character in text)
        # A prompt's tokens do not change when its answer follows, so the model sees what it was trained on.
        prompt = tokenizer.encode(problem.prompt).ids
        assert encoded.ids[: len(prompt)] == prompt


def test_the_generator_repeats_itself_for_one_seed_and_not_for_another() -> None:
    assert _take(40, seed=3) == _take(40, seed=3)
    assert _take(40, seed=3) != _take(40, seed=4)


@pytest.mark.parametrize("held_out", [False, True])
def test_worked_solutions_are_arithmetically_right(held_out: bool) -> None:
    taken = _take(300, held_out=held_out)
    assert {problem.story for problem in taken} == {story.__name__.strip("_") for story in problems.STORIES}
    for problem in taken:
        equations = problems.EQUATION.findall(problem.solution)
        assert 2 <= len(equations) <= 4
        assert problem.solution.count("=") == len(equations)
        for left, operator, right, result in equations:
            a, b = int(left), int(right)
            expected = {"+": a + b, "-": a - b, "*": a * b}.get(operator)
            if expected is None:
                assert a % b == 0
                expected = a // b
            assert expected == int(result) > 0
        assert int(equations[-1][3]) == problem.answer == problems.final_answer(problem.completion)


def test_every_number_of_a_solution_is_told_or_worked_out() -> None:
    for problem in _take(300):
        known = set(re.findall(r"\d+", problem.question))
        for left, _, right, result in problems.EQUATION.findall(problem.solution):
            assert {left, right} <= known
            known.add(result)


def test_held_out_problems_share_neither_question_nor_equations_with_training() -> None:
    training = _take(1500, seed=0, held_out=False)
    unseen = _take(150, seed=1_000_003)
    assert not any(problems.is_held_out(problem) for problem in training)
    assert all(problems.is_held_out(problem) for problem in unseen)
    assert {problem.chain for problem in training}.isdisjoint(problem.chain for problem in unseen)
    assert {problem.question for problem in training}.isdisjoint(problem.question for problem in unseen)


@pytest.mark.parametrize(
    ("completion", "answer"), [(" 1 + 1 = 2\n#### 2", 2), ("#### 1\n#### -3", -3), (" nothing", None), ("####", None)]
)
def test_the_final_answer_is_the_last_one(completion: str, answer: int | None) -> None:
    assert problems.final_answer(completion) == answer


def test_the_chat_template_writes_the_text_of_training() -> None:
    first, second = _take(2)
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a calculator."},
        {"role": "user", "content": first.question + "\n"},
        {"role": "assistant", "content": first.completion.strip()},
        {"role": "user", "content": [{"type": "text", "text": second.question}]},
    ]
    assert _render(chat[:2]) == first.prompt
    assert _render(chat) == first.prompt + first.completion + "<|endoftext|>\n" + second.prompt
    assert _render(chat[:3], add_generation_prompt=False) == first.prompt + first.completion + "<|endoftext|>\n"
    assert _render([{"role": "user", "content": first.prompt}]) == first.prompt


def test_the_chat_template_refuses_roles_it_does_not_know() -> None:
    with pytest.raises(jinja2.TemplateError, match="tool"):
        _render([{"role": "tool", "content": "4"}])


def test_the_model_card_states_what_was_measured() -> None:
    card = (DEMO / "MODEL_CARD.md").read_text(encoding="utf-8")
    for words in ("parameters", "pass@1", "pass@64", "greedy", "scripts/train_demo_model.py"):
        assert words in card
