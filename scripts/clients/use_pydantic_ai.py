"""pydantic-ai 2.68.0: typed answers by tools and by JSON schema, strict tools, on both APIs, and streamed.

toka-async serve model.chat_template=scripts/clients/tools.jinja &
python scripts/clients/use_pydantic_ai.py http://127.0.0.1:10210/v1
"""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS: Any = {"temperature": 1.0, "parallel_tool_calls": False}


class Answer(BaseModel):
    state: Literal["open", "paid"]
    is_gift: bool


async def use(model: Any) -> None:
    text = await Agent(model, instructions="Be brief.", model_settings=SETTINGS).run("What is 3 + 4?")
    assert isinstance(text.output, str)
    assert text.usage.output_tokens > 0
    for output in (NativeOutput(Answer, strict=True), ToolOutput(Answer, strict=True), Answer):
        agent: Any = Agent(model, output_type=output, model_settings=SETTINGS)
        answered = await agent.run("What is 3 + 4?")
        assert isinstance(answered.output, Answer), answered
        again = await agent.run("And 4 + 5?", message_history=answered.all_messages())
        assert isinstance(again.output, Answer), again
    typed: Any = Agent(model, output_type=NativeOutput(Answer, strict=True), model_settings=SETTINGS)
    async with typed.run_stream("What is 3 + 4?") as stream:
        parts = [part async for part in stream.stream_output()]
    assert isinstance(parts[-1], Answer)
    called: list[str] = []
    caller: Any = Agent(model, output_type=[ToolOutput(Answer, strict=True)], model_settings=SETTINGS)

    @caller.tool_plain(strict=True)  # type: ignore[untyped-decorator]
    def pay(currency: Literal["EUR", "USD"]) -> str:
        """Pays."""
        called.append(currency)
        return f"paid in {currency}"

    for _ in range(8):  # the model chooses between the tool and the answer
        answered = await caller.run("What is 3 + 4?")
        assert isinstance(answered.output, Answer)
    assert called
    print(f"pydantic-ai {version('pydantic-ai-slim')}: {type(model).__name__}")


async def main(url: str) -> None:
    provider = OpenAIProvider(base_url=url, api_key="none")
    await use(OpenAIChatModel("demo", provider=provider))
    await use(OpenAIResponsesModel("demo", provider=provider))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
