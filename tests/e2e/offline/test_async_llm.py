"""`AsyncLLM` with its processes: streams of all kinds, their ends, and tasks that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from toka_async import AsyncEngineArgs, AsyncLLM, Logprob, RequestOutput, RequestOutputKind, SamplingParams

QUESTION = "Question: Wei has 26 apples. Ivan has 2 times as many. How many do they have together?\nAnswer:"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    args = AsyncEngineArgs(model="demo", cache={"num_tokens": 32768}, max_num_seqs=8)
    made = AsyncLLM.from_engine_args(args)
    yield made
    made.shutdown()


GREEDY = SamplingParams(temperature=0.0)


async def collect(llm: AsyncLLM, params: SamplingParams, request_id: str = "r") -> list[RequestOutput]:
    return [output async for output in llm.generate(QUESTION, params, request_id)]


def params(kind: RequestOutputKind, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, seed=3, max_tokens=40, logprobs=1, output_kind=kind)


def list_values(entries: Sequence[dict[int, Logprob]]) -> list[float]:
    return [each.logprob for entry in entries for each in entry.values()]


async def test_all_kinds_of_outputs_say_the_same(llm: AsyncLLM) -> None:
    final = await collect(llm, params(RequestOutputKind.FINAL_ONLY, n=3))
    assert len(final) == 1
    deltas = await collect(llm, params(RequestOutputKind.DELTA, n=3))
    cumulative = await collect(llm, params(RequestOutputKind.CUMULATIVE, n=3))
    assert len(deltas) > 3
    for outputs in (deltas, cumulative):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for sample in final[0].outputs:
        parts = [part for output in deltas for part in output.outputs if part.index == sample.index]
        assert "".join(part.text for part in parts) == sample.text
        assert [token for part in parts for token in part.token_ids] == sample.token_ids
        # Bits differ: the second request finds its prompt in the cache, and its rows share other steps.
        entries = [entry for part in parts for entry in part.logprobs or ()]
        assert [[*entry] for entry in entries] == [[*entry] for entry in sample.logprobs or ()]
        assert list_values(entries) == pytest.approx(list_values(sample.logprobs or ()), abs=1e-5)
        *_, whole = [part for output in cumulative for part in output.outputs if part.index == sample.index]
        assert (whole.text, whole.token_ids, whole.finish_reason) == (
            sample.text,
            sample.token_ids,
            sample.finish_reason,
        )


async def test_log_probs_of_the_prompt_come_with_one_output(llm: AsyncLLM) -> None:
    (output,) = await collect(llm, SamplingParams(prompt_logprobs=0, max_tokens=4))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


async def test_many_streams_at_once(llm: AsyncLLM) -> None:
    alone = await collect(llm, params(RequestOutputKind.FINAL_ONLY))
    calls = [collect(llm, params(RequestOutputKind.DELTA), str(number)) for number in range(40)]
    for outputs in await asyncio.gather(*calls):
        assert "".join(output.outputs[0].text for output in outputs) == alone[0].outputs[0].text


async def test_an_aborted_request_ends_with_what_it_had(llm: AsyncLLM) -> None:
    outputs: list[RequestOutput] = []
    async for output in llm.generate([5, 6], SamplingParams(max_tokens=2000, ignore_eos=True), "long"):
        outputs.append(output)
        if len(outputs) == 1:
            await llm.abort("long")
    last = outputs[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids == outputs[-2].outputs[0].token_ids
    await llm.abort(["long", "other"])  # there are none any more


async def test_a_request_that_is_still_prepared_can_be_aborted(llm: AsyncLLM) -> None:
    call = asyncio.create_task(collect(llm, SamplingParams(max_tokens=2000, ignore_eos=True, n=8), "early"))
    await asyncio.sleep(0)
    await llm.abort("early")
    *_, last = await call
    assert {sample.finish_reason for sample in last.outputs} == {"abort"}


async def test_who_leaves_a_stream_makes_room(llm: AsyncLLM) -> None:
    """Eight sequences run at once, so the others run only if those are cancelled."""
    for number in range(16):
        stream = llm.generate([5, 6], SamplingParams(max_tokens=2000, ignore_eos=True, n=8), str(number))
        async with contextlib.aclosing(stream):
            await anext(stream)
    assert await collect(llm, params(RequestOutputKind.FINAL_ONLY))


async def test_ids_are_used_once_at_a_time(llm: AsyncLLM) -> None:
    both = await asyncio.gather(collect(llm, GREEDY, "same"), collect(llm, GREEDY, "same"), return_exceptions=True)
    assert sorted(type(each).__name__ for each in both) == ["ValueError", "list"]
    async with contextlib.aclosing(llm.generate(QUESTION, SamplingParams(), "same")) as stream:
        await anext(stream)
        with pytest.raises(ValueError, match="'same' is running"):
            await collect(llm, SamplingParams(), "same")
    with pytest.raises(ValueError, match="sampling_params: expected SamplingParams, got NoneType"):
        await collect(llm, None, "none")  # type: ignore[arg-type]


async def test_a_pause_keeps_requests_or_ends_them(llm: AsyncLLM) -> None:
    """Of a request that stays, nothing comes while the engine is paused."""
    long = SamplingParams(max_tokens=2000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    stream = llm.generate([5, 6], long, "kept")
    count = len((await anext(stream)).outputs[0].token_ids)
    await llm.pause_generation(mode="keep")
    assert await llm.is_paused()
    waiting = asyncio.create_task(collect(llm, GREEDY, "later"))
    outputs: list[RequestOutput] = []
    rest = asyncio.create_task(extend(outputs, stream))
    await llm.reset_prefix_cache()  # what came before the pause is there by now
    assert not rest.done()
    assert not waiting.done()
    await llm.resume_generation()
    assert (await waiting)[-1].finished
    await rest
    assert count + sum(len(output.outputs[0].token_ids) for output in outputs) == 2000
    stream = llm.generate([5, 6], long, "ended")
    await anext(stream)
    await llm.pause_generation()
    await llm.resume_generation()
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "abort"


async def extend(outputs: list[RequestOutput], stream: AsyncIterator[RequestOutput]) -> None:
    outputs += [output async for output in stream]


async def test_an_engine_sleeps_and_wakes(llm: AsyncLLM) -> None:
    await llm.sleep(level=1)
    assert await llm.is_sleeping()
    with pytest.raises(ValueError, match="'cache'"):
        await llm.wake_up(tags=["cache"])
    await llm.wake_up()
    assert not await llm.is_sleeping()
    assert (await collect(llm, GREEDY))[-1].finished


def test_methods_that_only_vllm_has_are_refused_with_advice(llm: AsyncLLM) -> None:
    assert not hasattr(llm, "generat")
    with pytest.raises(AttributeError, match=r"AsyncLLM.collective_rpc: no code of callers"):
        llm.collective_rpc("method")  # type: ignore[attr-defined]


def test_one_engine_serves_several_event_loops(llm: AsyncLLM) -> None:
    texts = {asyncio.run(collect(llm, params(RequestOutputKind.FINAL_ONLY)))[0].outputs[0].text for _ in range(2)}
    assert len(texts) == 1


async def test_a_tokenizer_and_the_context_are_known(llm: AsyncLLM) -> None:
    assert (await llm.get_tokenizer()).encode("Question:")
    assert llm.model_config.max_model_len == 2048
