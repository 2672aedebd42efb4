"""A TCP proxy whose connections a test can cut."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Cuttable:
    """Stands before a server at tcp://HOST:PORT. num_connections: those joined to the server up to now."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._writers: list[asyncio.StreamWriter] = []
        self._passes = asyncio.Event()
        self._passes.set()
        self.num_connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        self._passes.set()
        self.cut()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Breaks every connection, without a word."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    def silence(self) -> None:
        """Passes nothing on from now on, and breaks nothing, like a host that was switched off."""
        self._passes.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # else the loop complains at its end
            await self._join(reader, writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:  # there is no server
            writer.transport.abort()
            return
        both = [writer, back]
        self._writers += both
        self.num_connections += 1  # from here on `cut` breaks it
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        self._writers = [each for each in self._writers if each not in both]

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
