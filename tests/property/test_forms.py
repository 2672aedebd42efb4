"""Any bytes at all as an upload: an answer, a file or an error of the client's, and nothing left of it on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.cases.forms import FORMS, TYPES, content_type
from tests.drivers.web_server import WebServer, checked_error, web_server


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.AbstractEventLoop, WebServer, Path]]:
    """One server for all that is sent to it."""
    loop, folder = asyncio.new_event_loop(), tmp_path_factory.mktemp("forms")
    manager = web_server(data_dir=str(folder), max_file_mb=1)
    server = loop.run_until_complete(manager.__aenter__())
    yield loop, server, folder
    loop.run_until_complete(manager.__aexit__(None, None, None))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@settings(deadline=None, max_examples=150)
@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")
@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionParam")
@given(sent=FORMS, kind=TYPES)
def test_any_form_is_a_file_or_an_error(
    world: tuple[asyncio.AbstractEventLoop, WebServer, Path], sent: tuple[bytes, str | None], kind: str
) -> None:
    loop, server, folder = world
    data, boundary = sent

    async def send() -> None:
        headers = {"Content-Type": content_type(boundary, kind)}
        async with server.http.post(server.url + "/v1/files", data=data, headers=headers) as response:
            answer = await response.json()
            assert response.status in (200, 400, 413, 415), answer
            if response.status != 200:
                checked_error(answer)

    loop.run_until_complete(send())
    assert not list((folder / "uploads").iterdir())
