from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import toka_async
from toka_async.client.results import Event, FinishReason, PromptScores, Result, Sample, VersionSpan
from toka_async.llm.outputs import Logprob, OutputMaker, StreamedRequest, Submittable, WeightVersionSpan
from toka_async.llm.sampling_params import RequestOutputKind, SamplingParams
from toka_async.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(toka_async.__file__).parent / "demo")
IDS = TOKENIZER.encode(" 3 + 4 = 7")
END = min(TOKENIZER.special_ids)
MAKER = OutputMaker(TOKENIZER)


def submittable(params: SamplingParams) -> Submittable:
    return Submittable("r", None, [5, 6, 7], params, 16, 0)


def sample(ids: list[int], reason: FinishReason | None = "length", text: str = "") -> Sample:
    return Sample(np.array(ids, np.int32), text, reason)


def event(index: int, text: str, reason: FinishReason | None = None) -> Event:
    ids, logprobs = np.array(TOKENIZER.encode(text), np.int32), np.array([-0.5] * len(text), np.float32)
    return Event(ids, text, reason, None, logprobs[: ids.size], sample=index)


def test_texts_leave_out_the_end_token() -> None:
    params = SamplingParams(skip_special_tokens=False)
    (first,) = MAKER.make_whole(submittable(params), Result([sample([*IDS, END], "stop")], 0)).outputs
    assert first.text == " 3 + 4 = 7"
    assert first.token_ids == [*IDS, END]
    assert first.finished()
    params.include_stop_str_in_output = True
    (kept,) = MAKER.make_whole(submittable(params), Result([sample([*IDS, END], "stop")], 0)).outputs
    assert kept.text == " 3 + 4 = 7" + TOKENIZER.token_text(END)


def test_the_engines_text_is_kept_where_it_looked_for_stop_strings() -> None:
    (first,) = MAKER.make_whole(
        submittable(SamplingParams(stop="=")), Result([sample(IDS, "stop", " 3 + 4")], 0)
    ).outputs
    assert first.text == " 3 + 4"


def test_no_text_without_detokenize() -> None:
    params = SamplingParams(detokenize=False, logprobs=0)
    scored = sample([5])
    scored.logprobs = np.array([-1.0], np.float32)
    (first,) = MAKER.make_whole(submittable(params), Result([scored], 0)).outputs
    assert first.text == ""
    assert first.logprobs == [{5: Logprob(-1.0, None, None)}]


def test_log_probs_have_the_token_first_and_its_rank_if_known() -> None:
    scored = sample([5, 6])
    scored.logprobs = np.array([-0.5, -4.0], np.float32)
    scored.top_ids = np.array([[5, 9], [8, 9]], np.int32)
    scored.top_logprobs = np.array([[-0.5, -1.0], [-1.0, -2.0]], np.float32)
    (first,) = MAKER.make_whole(submittable(SamplingParams(logprobs=2)), Result([scored], 0)).outputs
    assert first.logprobs is not None
    own, other = first.logprobs
    assert list(own) == [5, 9]
    assert (own[5].rank, own[9].rank) == (1, 2)
    assert list(other) == [6, 8, 9]
    assert (other[6].rank, other[8].rank, other[9].rank) == (None, 1, 2)
    assert other[8].decoded_token == TOKENIZER.token_text(8)
    assert first.cumulative_logprob == pytest.approx(-4.5)


def test_prompts_have_log_probs_but_for_the_first_token() -> None:
    scores = PromptScores(
        np.array([-1.0, -2.0], np.float32),
        np.array([1, 40], np.int32),
        np.array([[6], [9]], np.int32),
        np.array([[-1.0], [-0.5]], np.float32),
    )
    output = MAKER.make_whole(submittable(SamplingParams(prompt_logprobs=1)), Result([sample(IDS)], 2, scores))
    assert output.prompt_logprobs is not None
    first, second, third = output.prompt_logprobs
    assert first is None
    assert second is not None
    assert list(second) == [6]
    assert third is not None
    assert list(third) == [7, 9]
    assert (third[7].rank, third[9].rank) == (40, 1)
    assert output.num_cached_tokens == 2
    assert MAKER.make_whole(submittable(SamplingParams()), Result([sample(IDS)], 2)).prompt_logprobs is None


def test_streams_are_cumulative_or_deltas() -> None:
    for kind, texts in ((RequestOutputKind.CUMULATIVE, [" 3", " 3 +"]), (RequestOutputKind.DELTA, [" 3", " +"])):
        params = SamplingParams(output_kind=kind, logprobs=0)
        stream = StreamedRequest(submittable(params), MAKER)
        outputs = [stream.take(event(0, " 3")), stream.take(event(0, " +", "length"))]
        assert [output.outputs[0].text for output in outputs] == texts
        assert [output.finished for output in outputs] == [False, True]
        last = outputs[-1].outputs[0]
        assert last.logprobs is not None
        assert len(last.logprobs) == len(last.token_ids)
        assert last.token_ids == TOKENIZER.encode(texts[-1])
        assert last.cumulative_logprob == pytest.approx(-0.5 * len(last.token_ids))


def test_a_stream_is_finished_with_its_last_sample() -> None:
    stream = StreamedRequest(submittable(SamplingParams(n=2)), MAKER)
    assert not stream.take(event(1, " 3", "stop")).finished
    assert stream.take(event(0, " 3", "stop")).finished


@pytest.mark.parametrize(("kind", "text"), [(RequestOutputKind.CUMULATIVE, " 3"), (RequestOutputKind.DELTA, "")])
def test_an_aborted_request_ends_its_open_samples(kind: RequestOutputKind, text: str) -> None:
    stream = StreamedRequest(submittable(SamplingParams(n=3, output_kind=kind)), MAKER)
    stream.take(event(0, " 3", "stop"))
    stream.take(event(1, " 3"))
    output = stream.abort()
    assert output.finished
    assert [(sample.index, sample.text, sample.finish_reason) for sample in output.outputs] == [
        (1, text, "abort"),
        (2, "", "abort"),
    ]


def test_parameters_and_outputs_go_to_other_processes() -> None:
    params = SamplingParams(n=2, stop=["a"])
    output = MAKER.make_whole(submittable(SamplingParams()), Result([sample(IDS)], 2))
    assert pickle.loads(pickle.dumps((params, output))) == (params, output)


def test_versions_of_the_weights_and_what_filters_kept() -> None:
    params = SamplingParams(logprobs=0, logprobs_mode="processed", detokenize=False)
    scored = sample([5, 6])
    scored.logprobs = np.array([-1.0, -2.0], np.float32)
    scored.kept, scored.masses = np.array([3, 4], np.int32), np.array([0.5, 0.25], np.float32)
    scored.versions = (VersionSpan("default", 0, 1), VersionSpan("step-1", 1, 2))
    (first,) = MAKER.make_whole(submittable(params), Result([scored], 0)).outputs
    assert first.weight_versions == [WeightVersionSpan("default", 0, 1), WeightVersionSpan("step-1", 1, 2)]
    assert (first.num_kept, first.kept_masses) == ([3, 4], [0.5, 0.25])


def test_versions_of_a_streams_parts_are_joined() -> None:
    stream = StreamedRequest(submittable(SamplingParams()), MAKER)
    for version, text in (("default", " 3"), ("default", " +"), ("step-1", " 4")):
        part = event(0, text)
        part.versions = (VersionSpan(version, 0, part.token_ids.size),)
        output = stream.take(part).outputs[0]
    num = len(output.token_ids)
    last = len(TOKENIZER.encode(" 4"))
    spans = [WeightVersionSpan("default", 0, num - last), WeightVersionSpan("step-1", num - last, num)]
    assert output.weight_versions == spans
