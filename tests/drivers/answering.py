"""A web server whose model gives one answer, with reasoning and tool calls in a known format."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.cases.tokenizers import byte_level
from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.arrays import as_i32
from toka_async.text.tokenizer import Tokenizer

TEMPLATE = (
    '{% if tools %}{{ tools | tojson }}\n<tool_call> "arguments"{% endif %}'
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% if thinks %}<think>\n{% endif %}{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
ANSWER = f"<think>\nLet me see.\n</think>\n\nI look.\n{CALL}\n{OTHER}"


@asynccontextmanager
async def answering(
    text: str = ANSWER, template: str = TEMPLATE, tokenizer: Tokenizer | None = None, **config: Any
) -> AsyncIterator[WebServer]:
    """A server whose model says this."""
    tokenizer = tokenizer or byte_level()
    ids, end = tokenizer.encode(text), tokenizer.eos_token_id
    assert end is not None
    script = FakeScheduler(lambda _submit, _sample: [*ids, *[end] * 400])
    async with web_server(script, tokenizer, template, **config) as running:
        yield running


def prompt(server: WebServer) -> str:
    return server.tokenizer.decode(as_i32(server.scheduler.submits[-1].prompt).tolist(), skip_special_tokens=False)
