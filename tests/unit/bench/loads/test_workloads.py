from __future__ import annotations

import itertools

import pytest

from tests.unit.bench.conftest import Parse
from toka_async.bench.loads.served import BenchError
from toka_async.bench.loads.workloads import build_bodies, build_warm_bodies, num_sequences

VOCAB = 1000


def test_many_samples(parse: Parse) -> None:
    options = parse("serve-load", "--prompts", "3", "--samples", "7", "--stop", "Question:", "--logprobs")
    asked = build_bodies(options, "m", None, run=0)
    assert num_sequences(asked) == 21
    assert len({body["prompt"] for body in asked}) == 3
    for body in asked:
        assert (body["model"], body["n"], body["max_tokens"], body["ignore_eos"]) == ("m", 7, 192, True)
        assert (body["temperature"], body["top_p"], body["stop"], body["logprobs"]) == (0.6, 1.0, ["Question:"], 0)
        assert "stream" not in body


def test_a_run_asks_the_same_lengths_of_other_prompts(parse: Parse) -> None:
    for load in ("samples", "ends", "trace", "single"):
        options = parse("serve-load", "--load", load, "--prompts", "2", "--requests", "5")
        first, again, second = (build_bodies(options, "m", VOCAB, run) for run in (0, 0, 1))
        assert first == again
        assert [body["max_tokens"] for body in first] == [body["max_tokens"] for body in second]
        assert not {str(body["prompt"]) for body in first} & {str(body["prompt"]) for body in second}
        if load == "trace":
            assert [len(body["prompt"]) for body in first] == [len(body["prompt"]) for body in second]


def test_a_trace_keeps_the_models_own_top_p(parse: Parse) -> None:
    for given, expected in ([], None), (["--top-p", "0.9"], 0.9):
        asked = build_bodies(parse("serve-load", "--load", "trace", "--requests", "4", *given), "m", VOCAB, 0)
        assert [body.get("top_p") for body in asked] == [expected] * 4
        assert all(0 < token < VOCAB for token in itertools.chain.from_iterable(body["prompt"] for body in asked))
        assert all(body["ignore_eos"] for body in asked)


def test_samples_that_end_by_themselves(parse: Parse) -> None:
    asked = build_bodies(parse("serve-load", "--load", "ends", "--prompts", "2", "--mean-tokens", "50"), "m", VOCAB, 0)
    for body in asked:
        assert len(set(body["stop_token_ids"])) == VOCAB // 50
        assert body["max_tokens"] == 1024
        assert "ignore_eos" not in body
    assert asked[0]["stop_token_ids"] != asked[1]["stop_token_ids"]


def test_who_knows_the_vocabulary(parse: Parse) -> None:
    with pytest.raises(BenchError, match="--vocab"):
        build_bodies(parse("serve-load", "--load", "trace", "--requests", "1"), "m", None, 0)
    said = build_bodies(parse("serve-load", "--load", "ends", "--vocab", "600", "--prompts", "1"), "m", VOCAB, 0)
    assert max(said[0]["stop_token_ids"]) < 600


def test_a_small_load_first(parse: Parse) -> None:
    options = parse("serve-load", "--prompts", "16", "--samples", "1024")
    warm = build_warm_bodies(options, "m", None)
    assert [(body["n"], body["max_tokens"]) for body in warm] == [(256, 32)] * 4
    assert not {body["prompt"] for body in warm} & {body["prompt"] for body in build_bodies(options, "m", None, 0)}


def test_one_user_streams(parse: Parse) -> None:
    asked = build_bodies(parse("serve-load", "--load", "single"), "m", None, 0)
    assert len(asked) == 8
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in asked)
    assert all((body["n"], body["max_tokens"]) == (1, 256) for body in asked)


def test_rollouts_are_groups_with_a_long_tail(parse: Parse) -> None:
    options = parse("serve-load", "--load", "rollouts", "--prompts", "32", "--mean-tokens", "100")
    asked = build_bodies(options, "m", None, 0)
    assert len(asked) == 32 * 16
    prompts = [body["prompt"] for body in asked]
    assert prompts == [prompt for prompt in dict.fromkeys(prompts) for _ in range(16)]
    assert len(set(prompts)) == 32
    lengths = sorted(body["max_tokens"] for body in asked)
    assert lengths[len(lengths) // 2] < 100 < lengths[-1] <= 1600
    assert (
        sum(lengths[-len(lengths) // 10 :]) > sum(lengths) / 4
    )  # a tenth of them has more than a quarter of the tokens
    assert len({body["seed"] for body in asked}) == len(asked)
    again = build_bodies(options, "m", None, 1)
    assert [body["max_tokens"] for body in again] == [body["max_tokens"] for body in asked]
    assert again[0]["prompt"] != asked[0]["prompt"]
    assert num_sequences(asked) == 512
