"""openai-agents 0.24.0: an agent with a strict tool and a typed answer, on responses and on chats, whole and streamed.

toka-async serve model.chat_template=scripts/clients/tools.jinja &
python scripts/clients/use_agents.py http://127.0.0.1:10210/v1
"""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    state: Literal["open", "paid"]
    is_gift: bool


@function_tool  # type: ignore[untyped-decorator]
def pay(currency: Literal["EUR", "USD"]) -> str:
    """Pays."""
    return f"paid in {currency}"


async def use(model: Any) -> None:
    name = type(model).__name__
    settings = ModelSettings(temperature=1.0, parallel_tool_calls=False)
    plain = Agent(name="plain", instructions="Be brief.", model=model, model_settings=settings)
    answered = await Runner.run(plain, "What is 3 + 4?")
    assert isinstance(answered.final_output, str)
    typed = Agent(name="typed", model=model, model_settings=settings, output_type=Answer)
    answered = await Runner.run(typed, "What is 3 + 4?")
    assert isinstance(answered.final_output, Answer)
    forced = ModelSettings(temperature=1.0, parallel_tool_calls=False, tool_choice="required")
    caller = Agent(name="caller", model=model, model_settings=forced, tools=[pay])  # the choice is reset after a call
    answered = await Runner.run(caller, "What is 3 + 4?")
    kinds = [type(item).__name__ for item in answered.new_items]
    assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"], kinds
    assert kinds[-1] == "MessageOutputItem", kinds
    streamed = Runner.run_streamed(caller, "What is 3 + 4?")
    kinds = [event.type async for event in streamed.stream_events()]
    assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
    assert isinstance(streamed.final_output, str)
    usage = answered.context_wrapper.usage
    assert usage.requests == 2
    assert usage.output_tokens > 0
    print(f"openai-agents {version('openai-agents')}: {name}")


async def main(url: str) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        await use(OpenAIResponsesModel(model="demo", openai_client=client))
        await use(OpenAIChatCompletionsModel(model="demo", openai_client=client))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
