"""Servers with API keys, and what those who have one of them ask."""

from __future__ import annotations

import json
from typing import Any

import openai
from openai.types import Batch

from tests.drivers.until import until_async
from tests.drivers.web_server import WebServer
from toka_async.server.access.keys import Key, Keys, digest_key

ALICE, BOB = "sk-alice-0123456", "sk-bob-01234567"
KEYS = Keys((Key(digest_key(ALICE), "alice", 2, 40), Key(digest_key(BOB), "bob")))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(server: WebServer, key: str, **fields: Any) -> tuple[int, Any, str | None]:
    """Status, body and Retry-After of a completion of 3 prompt tokens."""
    body = {"prompt": [1, 2, 3], "max_tokens": 10} | fields
    async with server.http.post(server.url + "/v1/completions", json=body, headers=bearer(key)) as response:
        return response.status, await response.json(), response.headers.get("Retry-After")


async def batch_of(client: openai.AsyncOpenAI, num_lines: int) -> Batch:
    body = {"prompt": [1, 2, 3], "max_tokens": 10}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **line}) for number in range(num_lines)]
    file = await client.files.create(file=("in", "\n".join(lines).encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async def completed() -> Batch | None:
        found = await client.batches.retrieve(batch.id)
        return found if found.status == "completed" else None

    return await until_async(completed)
