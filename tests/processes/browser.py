"""A headless Chromium that a test drives, over the DevTools protocol (https://chromedevtools.github.io/devtools-protocol).

CHROMIUM names the program; else it is looked for. A page's complaints (errors on its console, exceptions, violations of
its content policy, loads that fail) are kept for the test to look at.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--disable-sync"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--no-first-run"),
    *("--no-default-browser-check", "--force-color-profile=srgb", "--remote-debugging-port=0"),
)
LISTENING = "DevTools listening on "
TIMEOUT = 30.0  # seconds for what a page is waited for


def find_chromium() -> str | None:
    """The program; None where there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class PageError(AssertionError):
    """A script failed in the page, or what it was waited for did not come."""


class Page:
    """One tab. complaints: of the page, in order."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(TIMEOUT):
            answer = await answered
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        """Loads a page, with its scripts."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(TIMEOUT):
            await self._loaded.wait()

    async def eval(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        done = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if details := done.get("exceptionDetails"):
            raise PageError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return done["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Waits until an expression is true; its value. The page itself looks, as often as it is drawn."""
        looking = f"""new Promise((resolve, reject) => {{
            const until = performance.now() + {(TIMEOUT - 2) * 1000};
            const look = () => {{
                const value = ({condition});
                if (value) resolve(value);
                else if (performance.now() > until) reject(new Error("it never was so"));
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        try:
            return await self.eval(looking)
        except PageError as error:
            text = await self.eval("document.body.innerText")
            raise PageError(
                f"{condition}: {error.args[0][-300:]}; complaints: {self.complaints}; page:\n{text}"
            ) from None

    async def click(self, selector: str) -> None:
        await self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    async def fill(self, selector: str, value: str) -> None:
        """As if somebody had typed it and gone on."""
        await self.eval(
            f"""{{
                const field = document.querySelector({json.dumps(selector)});
                field.value = {json.dumps(value)};
                field.dispatchEvent(new Event("input", {{bubbles: true}}));
                field.dispatchEvent(new Event("change", {{bubbles: true}}));
            }}"""
        )

    async def text(self, selector: str) -> str:
        return str(await self.eval(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def screenshot(self, path: Path) -> None:
        """Of what is seen, as PNG."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))

    async def size(self, width: int, height: int, scheme: str = "dark") -> None:
        """Of the window; the colours that the person prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def close(self) -> None:
        await self._socket.close()
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if (number := said.get("id")) is not None:
                answered = self._waiting.pop(number)
                if not answered.done():
                    answered.set_result(said)
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif complaint := complaint_of(said["method"], said["params"]):
                self.complaints.append(complaint)


def complaint_of(method: str, params: dict[str, Any]) -> str | None:
    match method:
        case "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            return str(details.get("exception", {}).get("description", details["text"]))
        case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
            return " ".join(str(each.get("value", each.get("description"))) for each in params["args"])
        case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
            return f"{params['entry']['text']} {params['entry'].get('url', '')}".strip()
    return None


@asynccontextmanager
async def browser_page(program: str, folder: Path) -> AsyncIterator[Page]:
    """A tab of a browser of its own, whose profile is in `folder`. The browser is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        program,
        *OPTIONS,
        f"--user-data-dir={folder / 'profile'}",
        "about:blank",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    draining = None
    try:
        address = await listening(process.stderr)
        draining = asyncio.create_task(drain(process.stderr))
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{address}/json/list") as response:
                (tab, *_) = [each for each in await response.json() if each["type"] == "page"]
            async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                try:
                    yield page
                finally:
                    with suppress(PageError, TimeoutError, aiohttp.ClientError, ConnectionError):
                        await page.call("Browser.close")
                    await page.close()
    finally:
        try:
            async with asyncio.timeout(60):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if draining is not None:
            draining.cancel()


async def listening(errors: asyncio.StreamReader) -> str:
    """The address of the browser's own server."""
    said = []
    async with asyncio.timeout(TIMEOUT):
        async for line in errors:
            said.append(line.decode(errors="replace"))
            if said[-1].startswith(LISTENING):
                host = said[-1].removeprefix(LISTENING).split("/")[2]
                return f"http://{host}"
    raise PageError(f"the browser did not start: {''.join(said)}")


async def drain(errors: asyncio.StreamReader) -> None:
    """So that the browser never waits for somebody to read what it says."""
    while await errors.read(65536):
        pass
