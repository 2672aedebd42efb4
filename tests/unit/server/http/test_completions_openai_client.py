from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from tests.cases.tokenizers import byte_level
from tests.drivers.until import until
from tests.drivers.web_server import NAME, WebServer, web_server
from tests.fakes.scheduler import FakeScheduler


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    ids = byte_level().encode("the answer is 42. 你好")
    end = byte_level().eos_token_id
    assert end is not None
    async with web_server(FakeScheduler(lambda _submit, _sample: [*ids, *[end] * 400])) as running:
        yield running


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=NAME, prompt="what", n=2, max_tokens=50, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["the answer is 42. 你好"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None


async def test_completions_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=NAME, prompt=[5, 6], max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "the answer is 42. 你好"
    assert usage is not None
    assert usage.prompt_tokens == 2


async def test_chat(client: openai.AsyncOpenAI, server: WebServer) -> None:
    answer = await client.chat.completions.create(
        model=NAME,
        messages=[
            {"role": "developer", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        stop=["42"],
        logprobs=True,
        top_logprobs=1,
        user="me",
        metadata={"a": "b"},
        extra_body={"top_k": 5, "min_p": 0.1, "return_token_ids": True},
    )
    assert answer.choices[0].message.content == "the answer is "
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["stop_reason"] == "42"
    (submit,) = server.scheduler.submits
    assert submit.sampling.top_k == 5


async def test_chat_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hi"}], n=2, stream=True
    )
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["the answer is 42. 你好"] * 2


async def test_the_synchronous_client(server: WebServer) -> None:
    def use() -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.completions.create(model=NAME, prompt=["x"], max_tokens=50).choices[0].text
            stream = client.completions.create(model=NAME, prompt="x", max_tokens=50, stream=True)
            pieces = "".join(chunk.choices[0].text for chunk in stream)
            return whole, pieces, [model.id for model in client.models.list()]

    whole, pieces, models = await asyncio.to_thread(use)
    assert whole == pieces == "the answer is 42. 你好"
    assert models == [NAME]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert (await client.models.retrieve(NAME)).id == NAME


async def test_errors(client: openai.AsyncOpenAI, server: WebServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model=NAME, prompt="x", temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as tools:
        await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert tools.value.param == "tools"
    server.engine.fail_all("rank 0 died")
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model=NAME, prompt="x")


async def test_an_error_in_a_stream(client: openai.AsyncOpenAI, server: WebServer) -> None:
    server.scheduler.held = True
    creating = asyncio.create_task(client.completions.create(model=NAME, prompt="x", max_tokens=50, stream=True))
    await until(lambda: server.engine.num_requests)
    server.scheduler.step()
    stream = await creating
    server.engine.fail_all("rank 0 died")
    with pytest.raises(openai.APIError, match="rank 0 died"):
        async for _ in stream:
            pass


async def test_closing_a_stream_cancels(client: openai.AsyncOpenAI, server: WebServer) -> None:
    server.scheduler.held = True
    creating = asyncio.create_task(client.completions.create(model=NAME, prompt="x", max_tokens=50, stream=True))
    await until(lambda: server.engine.num_requests)
    server.scheduler.step()
    await (await creating).close()
    await asyncio.wait_for(server.engine.wait_idle(), 60)
    server.scheduler.step()
    assert not server.scheduler.requests
