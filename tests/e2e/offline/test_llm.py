"""`LLM` with its processes: what comes back is what a server answers, and what transformers compute."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import toka_async
from tests.processes.serving import serving
from toka_async import LLM, RequestOutput, SamplingParams, TokensPrompt
from toka_async.client import RequestError

DEMO = Path(toka_async.__file__).parent / "demo"
QUESTION = "Question: Wei has 26 apples. Ivan has 2 times as many. How many do they have together?\nAnswer:"
OTHERS = ["Question: Ben earns 10 dollars an hour.", "Question:"]
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", cache={"num_tokens": 32768}, max_num_seqs=64) as made:
        yield made


def generate_one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


@torch.inference_mode()
def score(ids: list[int]) -> torch.Tensor:
    """Log-probs [t - 1, vocabulary] of the tokens after the first, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)


def test_answers_are_those_of_a_server(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(n=3, seed=5, temperature=0.9, max_tokens=60, logprobs=2, stop=["apples."])
    output = generate_one(llm, QUESTION, params)
    chat = llm.chat(MESSAGES, SamplingParams(seed=1, max_tokens=40), use_tqdm=False)[0]
    with serving(tmp_path) as server:
        fields = {"n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 60, "logprobs": 2, "stop": ["apples."]}
        _, answer = server.post("/v1/completions", prompt=QUESTION, return_token_ids=True, **fields)
        _, of_chat = server.post(
            "/v1/chat/completions", messages=MESSAGES, seed=1, temperature=1.0, max_tokens=40, return_token_ids=True
        )
    assert output.prompt == QUESTION
    for sample, choice in zip(output.outputs, answer["choices"], strict=True):
        assert output.prompt_token_ids == choice["prompt_token_ids"]
        assert sample.text == choice["text"]
        assert sample.token_ids == choice["token_ids"]
        assert sample.finish_reason == choice["finish_reason"]
        assert sample.stop_reason == choice["stop_reason"]
        assert sample.logprobs is not None
        own = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert own == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
    assert chat.outputs[0].text == of_chat["choices"][0]["message"]["content"]
    assert chat.prompt_token_ids == of_chat["prompt_token_ids"]


def test_greedy_answers_and_log_probs_are_transformers(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    output = generate_one(llm, QUESTION, params)
    (sample,) = output.outputs
    ids = output.prompt_token_ids + sample.token_ids
    expected = score(ids)
    assert output.prompt_logprobs is not None
    assert sample.logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *sample.logprobs]
    assert len(entries) == len(ids) - 1
    for place, (row, token, entry) in enumerate(zip(expected, ids[1:], entries, strict=True)):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
        if place < len(output.prompt_token_ids) - 1:
            assert entry[token].rank == 1 + int((row > row[token]).sum())
        values = sorted((float(each.logprob) for each in entry.values()), reverse=True)[:3]
        assert values == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
    assert sample.token_ids == expected[len(output.prompt_token_ids) - 1 :].argmax(-1).tolist()


def test_each_prompt_has_its_parameters_and_its_place(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=3 + place % 3, n=1 + place % 2) for place in range(40)]
    prompts = [TokensPrompt(prompt_token_ids=[5 + place, 7]) for place in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False, priority=list(range(40)))
    assert [output.prompt_token_ids for output in outputs] == [[5 + place, 7] for place in range(40)]
    assert [len(output.outputs) for output in outputs] == [each.n for each in params]
    assert all(
        len(sample.token_ids) <= (each.max_tokens or 0)
        for output, each in zip(outputs, params, strict=True)
        for sample in output.outputs
    )


def test_many_prompts_come_back_in_order(llm: LLM) -> None:
    prompts = [[5 + place % 500, 6] for place in range(2500)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished for output in outputs)


def test_a_completion_ends_with_the_context(llm: LLM) -> None:
    most = llm.model_config.max_model_len
    assert most == 2048
    for max_tokens in (None, 500):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (sample,) = generate_one(llm, [5] * (most - 3), params).outputs
        assert (len(sample.token_ids), sample.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ([5] * 2048, "has 2048 tokens"),
        ([608], "out of range"),
        ([-1], "out of range"),
        ("", "no tokens"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_named(llm: LLM, prompt: Any, part: str) -> None:
    with pytest.raises(ValueError, match=f"prompt 1 .*{part}"):
        llm.generate(["Question:", prompt], GREEDY, use_tqdm=False)


def test_a_completion_may_end_before_the_tokens_that_it_has_to_have(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, min_tokens=10)
    outputs = llm.generate([[5] * 2045, [5]], params, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 3
    assert len(outputs[1].outputs[0].token_ids) >= 10


def test_a_seed_decides_about_requests_without_one() -> None:
    """The tokens of the simulated rank depend on the seeds of requests alone."""
    params, answers = SamplingParams(n=2, max_tokens=8, ignore_eos=True), []
    for seed in (0, 0, 1):
        with LLM("demo", seed=seed, device="simulated", max_num_seqs=8) as other:
            outputs = other.generate([[5, 6]] * 4, params)
            answers.append([sample.token_ids for output in outputs for sample in output.outputs])
    assert len({tuple(ids) for ids in answers[0]}) == 8
    assert answers[0] == answers[1] != answers[2]


def test_special_tokens_are_shown_on_request(llm: LLM) -> None:
    params = GREEDY.clone()
    params.skip_special_tokens = params.spaces_between_special_tokens = False
    params.include_stop_str_in_output = True
    shown, plain = generate_one(llm, QUESTION, params).outputs[0], generate_one(llm, QUESTION, GREEDY).outputs[0]
    end = llm.get_tokenizer().decode(shown.token_ids[-1:])
    assert shown.text == plain.text + end


def test_without_parameters_the_models_own_hold(llm: LLM) -> None:
    assert llm.get_default_sampling_params().temperature == 0.3
    assert llm.generate(QUESTION, use_tqdm=False)[0].outputs[0].text


def test_conversations_may_be_many_and_have_their_own_template(llm: LLM) -> None:
    two = llm.chat([MESSAGES, MESSAGES], GREEDY, use_tqdm=False)
    assert two[0].outputs[0].text == two[1].outputs[0].text
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (plain,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template=template)
    assert plain.prompt == "What is 3 + 4?"


def test_a_wrong_request_is_refused_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([[5], [6]], SamplingParams(logit_bias={100_000: 1.0}), use_tqdm=False)
    assert caught.value.field == "logit_bias"
    with pytest.raises(ValueError, match="1 for 2 prompts"):
        llm.generate(OTHERS, [GREEDY], use_tqdm=False)
    for wrong in ({"temperature": 0}, [GREEDY, None]):
        with pytest.raises(ValueError, match="sampling_params: expected SamplingParams"):
            llm.generate(OTHERS, wrong, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="priority: 1 for 2 prompts"):
        llm.generate(OTHERS, GREEDY, use_tqdm=False, priority=[1])
    assert generate_one(llm, [5], GREEDY).finished


def test_token_ids_have_an_older_name_too(llm: LLM) -> None:
    (named,) = llm.generate(prompt_token_ids=[[5, 6]], sampling_params=GREEDY, use_tqdm=False)
    assert named.outputs == generate_one(llm, [5, 6], GREEDY).outputs
    with pytest.raises(ValueError, match="give one of them"):
        llm.generate("Question:", prompt_token_ids=[[5]], use_tqdm=False)
    with pytest.raises(ValueError, match="prompts: give text, token ids"):
        llm.generate(use_tqdm=False)


def test_methods_that_only_vllm_has_are_refused_with_advice(llm: LLM) -> None:
    assert not hasattr(llm, "collective_rpc")
    with pytest.raises(AttributeError, match=r"LLM.beam_search: not supported; use SamplingParams\(n=…\)"):
        llm.beam_search(["a"], None)  # type: ignore[attr-defined]


def test_priorities_are_one_or_many(llm: LLM) -> None:
    for priority in (1, [1, 2]):
        assert len(llm.generate(OTHERS, GREEDY, use_tqdm=False, priority=priority)) == 2


def test_an_engine_cannot_be_sent_to_another_process(llm: LLM) -> None:
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(llm)


def test_a_reset_forgets_earlier_prompts(llm: LLM) -> None:
    prompt = "Question: " * 30
    generate_one(llm, prompt, GREEDY)
    assert generate_one(llm, prompt, GREEDY).num_cached_tokens
    assert llm.reset_prefix_cache()
    assert generate_one(llm, prompt, GREEDY).num_cached_tokens == 0


def test_an_engine_that_slept_goes_on_when_its_cache_is_back(llm: LLM) -> None:
    before = generate_one(llm, QUESTION, GREEDY).outputs[0].text
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    call = threading.Thread(target=lambda: texts.append(generate_one(llm, QUESTION, GREEDY).outputs[0].text))
    texts: list[str] = []
    call.start()
    with pytest.raises(ValueError, match="'cache'"):
        llm.wake_up(tags=["cache"])
    assert not texts
    llm.wake_up(tags=["kv_cache"])
    call.join()
    assert texts == [before]


def test_threads_share_an_engine(llm: LLM) -> None:
    alone = generate_one(llm, QUESTION, GREEDY).outputs[0].text
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(generate_one(llm, QUESTION, GREEDY).outputs[0].text))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [alone] * 4


def test_a_running_event_loop_is_no_hindrance(llm: LLM) -> None:
    """As in a notebook."""

    async def run() -> RequestOutput:
        return generate_one(llm, QUESTION, GREEDY)

    assert asyncio.run(run()).finished


def test_bars_are_told_of_each_prompt(llm: LLM) -> None:
    told: list[int] = []

    class Bar:
        def __init__(self, total: int, **_options: Any) -> None:
            assert total == 3

        def update(self, n: int) -> None:
            told.append(n)

        def close(self) -> None:
            told.append(-1)

    llm.generate([QUESTION, *OTHERS], GREEDY, use_tqdm=Bar)
    assert told == [1, 1, 1, -1]


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode(QUESTION) == generate_one(llm, QUESTION, GREEDY).prompt_token_ids
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered == llm.chat(MESSAGES, GREEDY, use_tqdm=False)[0].prompt
