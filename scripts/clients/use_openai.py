"""openai 3.54: `.parse()` and `.stream()` with pydantic models, n = 8, on chats and on responses; strict tools.

toka-async serve model.chat_template=scripts/clients/tools.jinja &
python scripts/clients/use_openai.py http://127.0.0.1:10210/v1
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

MODEL = "demo"
MESSAGES = [{"role": "user", "content": "Mia buys 3 pens for 4 dollars each. How much does Mia pay?"}]
N = 8


class Item(BaseModel):
    name: Literal["pen", "book", "cup"]
    count: int = Field(ge=0, le=99)


class Order(BaseModel):
    """Few places for blanks: the built-in model writes up to 64 at each, and its context has 2,048 tokens."""

    items: list[Item] = Field(max_length=1)
    state: Literal["open", "paid"] | None


class Pay(BaseModel):
    """Pays an amount."""

    amount: int = Field(ge=0, le=999)
    currency: Literal["EUR", "USD"]


def use_chats(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 1.0}
    parsed = client.chat.completions.parse(**asked, n=N, response_format=Order)
    assert len(parsed.choices) == N
    assert all(isinstance(choice.message.parsed, Order) for choice in parsed.choices)
    with client.chat.completions.stream(**asked, n=N, response_format=Order) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk"} <= kinds, kinds
    assert all(isinstance(choice.message.parsed, Order) for choice in final.choices)
    asked |= {"parallel_tool_calls": False}  # the built-in model would make calls up to the end of its context
    tools = [openai.pydantic_function_tool(Pay)]
    called = client.chat.completions.parse(**asked, n=N, tools=tools, tool_choice="required")
    for choice in called.choices:
        assert choice.message.tool_calls
        assert all(isinstance(each.function.parsed_arguments, Pay) for each in choice.message.tool_calls)
    free = client.chat.completions.parse(**asked, n=N, tools=tools, max_tokens=200)  # strict, and its own choice
    assert len(free.choices) == N
    with client.chat.completions.stream(**asked, n=N, tools=tools, tool_choice="required") as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert len(done) == sum(len(choice.message.tool_calls or ()) for choice in final.choices) >= N


async def use_responses(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": MESSAGES, "temperature": 1.0}
    parsed = await asyncio.gather(*[client.responses.parse(**asked, text_format=Order) for _ in range(N)])
    assert all(isinstance(response.output_parsed, Order) for response in parsed)
    for text_format in (Order, None):
        more: dict[str, Any] = {} if text_format is None else {"text_format": text_format}
        async with client.responses.stream(**asked, **more) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed", kinds[-1]
        assert text_format is None or isinstance(final.output_parsed, Order)
    tools = [openai.pydantic_function_tool(Pay)]
    asked |= {"parallel_tool_calls": False}
    called = await client.responses.parse(**asked, tools=tools, tool_choice="required")
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls
    assert all(isinstance(each.parsed_arguments, Pay) for each in calls)
    outputs = [{"type": "function_call_output", "call_id": each.call_id, "output": "paid"} for each in calls]
    history = [*MESSAGES, *called.output, *outputs]
    after = await client.responses.create(**(asked | {"input": history}))
    assert after.status in ("completed", "incomplete")
    logged = await client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=3)
    (part,) = logged.output[0].content
    assert part.logprobs
    assert all(len(each.top_logprobs) == 3 for each in part.logprobs)
    refused = await asyncio.gather(
        client.responses.create(**asked, previous_response_id="resp_1"), return_exceptions=True
    )
    assert isinstance(refused[0], openai.BadRequestError)
    assert refused[0].param == "previous_response_id"


def main(url: str) -> None:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        use_chats(client)

    async def run() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await use_responses(client)

    asyncio.run(run())
    print(f"openai {openai.__version__}: chats and responses, n = {N}, parsed and streamed")


if __name__ == "__main__":
    main(*sys.argv[1:])
