from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.drivers.direct import Bare, bare_endpoint
from tests.drivers.web_server import WebServer, web_server


@pytest.fixture
async def bare() -> AsyncIterator[Bare]:
    with bare_endpoint() as made:
        yield made


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server() as running:
        yield running


@pytest.fixture
async def client(server: WebServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
