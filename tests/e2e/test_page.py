from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.processes.browser import Page, browser_page, find_chromium
from tests.processes.serving import Serving, serving

KEY = "sk-page-0123456"
TEXTS = "[...document.querySelectorAll('.sample .text')]"
STATUS = "document.querySelector('#run-status').textContent"
SHIFTED = """new Promise((resolve) => {
    const look = (list) => resolve(list.getEntries().reduce((sum, each) => sum + each.value, 0));
    new PerformanceObserver(look).observe({type: "layout-shift", buffered: true});
    setTimeout(() => resolve(0), 200);
})"""  # how far things have moved that people look at, since the page was loaded
MARKUP = "<img src=x onerror=\"document.title='run'\">"


@pytest.fixture(scope="module")
def program() -> str:
    """The browser. Where one is named, as CI does, it has to be there."""
    found = find_chromium()
    if found is None:
        pytest.skip("there is no Chromium: install Debian's package `chromium`, or name one in CHROMIUM")
    if shutil.which(found) is None:
        pytest.fail(f"CHROMIUM={found}: there is no such program")
    return found


@pytest.fixture(scope="module")
def server(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """With the built-in model, for everybody."""
    del program  # none is started for tests that are skipped
    folder = tmp_path_factory.mktemp("page")
    with serving(folder, f"server.data_dir={folder / 'data'}") as running:
        yield running


@pytest.fixture
async def page(program: str, tmp_path: Path) -> AsyncIterator[Page]:
    async with browser_page(program, tmp_path) as opened:
        await opened.size(1440, 900)
        yield opened


def run_batch(url: str, num_lines: int) -> None:
    """Makes a batch whose name is markup."""
    bodies = [{"model": "demo", "prompt": "Question:", "max_tokens": 16} for _ in range(num_lines)]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"name": MARKUP}
        )


async def test_samples_votes_and_batches(server: Serving, page: Page) -> None:
    await page.open(f"{server.url}/")
    await page.until("document.querySelector('#health').textContent === 'serving'")
    assert re.fullmatch(r"CPU \(\d+ threads?\)", await page.text("#fact-device"))
    assert await page.text("#fact-dtype") == "float32"
    assert "MiB" in await page.text("#devices")

    await page.fill("[name=n]", "8")
    await page.fill("[name=seed]", "1")
    await page.click("#send")
    await page.until(f"{STATUS} === 'done'")
    texts = await page.eval(f"{TEXTS}.map((each) => each.textContent)")
    assert len(texts) == 8
    assert all("####" in text for text in texts)
    votes = await page.eval(
        "[...document.querySelectorAll('.vote li:not([hidden]) .count')].map((each) => parseInt(each.textContent))"
    )
    assert votes == sorted(votes, reverse=True)
    assert sum(votes) == 8
    num_tokens = await page.eval("document.querySelectorAll('.sample .text span').length")
    assert (await page.text("#run-tokens")).replace(",", "") == str(num_tokens + 8)  # each ends with one without a text

    hovered = "document.querySelector('.sample .text span')"
    await page.eval(f"{hovered}.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}))")
    assert await page.eval("document.querySelectorAll('#tip tr').length") in (5, 6)
    assert await page.eval("document.querySelector('#tip').checkVisibility()")
    await page.eval("document.querySelector('.sample .text').focus()")
    for _ in range(2):
        await page.eval(
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))"
        )
    assert (
        await page.eval("[...document.querySelectorAll('.sample .text span')].findIndex((s) => s.matches('.current'))")
        == 1
    )
    await page.click(".vote button")
    shown = await page.eval("document.querySelectorAll('.sample:not(.faded)').length")
    assert shown == votes[0]

    await asyncio.to_thread(run_batch, server.url, 30)
    await page.until("document.querySelector('#batches')?.textContent.includes('30 / 30')")
    assert await page.text("#batches td") == MARKUP
    assert (
        await page.eval("document.querySelector('#batches [role=progressbar]').getAttribute('aria-valuenow')") == "30"
    )
    await page.until("document.querySelector('#tile-first').textContent !== '–'")
    assert await page.eval("document.images.length") == 0
    assert await page.eval(SHIFTED) < 0.02
    assert page.complaints == []


async def test_a_chunk_is_split_into_its_tokens(server: Serving, page: Page) -> None:
    await page.open(f"{server.url}/")

    async def split(text: str, *tokens: str) -> Any:
        chunk = f"{json.dumps(text)}, {json.dumps([{'text': token} for token in tokens])}"
        return await page.eval(
            f"import('/page/samples.js').then(({{split}}) => split({chunk}).map(([shown, of]) => [shown, of.length]))"
        )

    assert await split("a b", "a", " b", "<|end|>") == [["a", 1], [" b", 1]]
    assert await split("", "<|end|>") == []
    assert await split("é!", "\ufffd", "\ufffd", "!") == [["é!", 3]]
    assert await split("ab c", "a", "b") == [["a", 1], ["b c", 1]]
    assert await split("a", "", "a", "b") == [["a", 1]]


async def test_chat_and_errors(server: Serving, page: Page) -> None:
    """What the API refuses is said with the field that is at fault."""
    await page.open(f"{server.url}/")
    await page.until("document.querySelector('#health').textContent === 'serving'")
    await page.click("#kind-chat")
    assert await page.eval("document.querySelector('[name=system]').checkVisibility()")
    await page.fill("[name=n]", "2")
    await page.fill("[name=logprobs]", "")
    await page.fill("[name=max_tokens]", "5")
    await page.click("#send")
    await page.until(f"{STATUS} === 'done'")
    assert await page.text("#run-tokens") == "10"
    assert await page.eval("document.querySelectorAll('.sample .text span').length") == 0
    assert page.complaints == []

    await page.fill("[name=max_tokens]", "200")
    await page.fill("[name=response_format]", '{"enum": ["yes"]}')
    await page.click("#send")
    await page.until(f"{STATUS} === 'done'")
    texts = await page.eval("[...document.querySelectorAll('.sample .text')].map((each) => each.textContent.trim())")
    assert texts == ['"yes"', '"yes"']
    for schema, said in (("{", "not JSON"), ('{"uniqueItems": true, "type": "array"}', "uniqueItems")):
        await page.fill("[name=response_format]", schema)
        await page.click("#send")
        await page.until(f"document.querySelector('#try-error').textContent.includes('{said}')")
        assert await page.eval("document.querySelector('[aria-invalid]').name") == "response_format"
    await page.fill("[name=response_format]", "")

    await page.fill("[name=top_p]", "7")
    await page.click("#send")
    await page.until(f"{STATUS} === 'failed'")
    assert "top_p" in await page.text("#try-error")
    assert await page.eval("document.querySelector('[aria-invalid]').name") == "top_p"
    assert await page.eval("document.activeElement.name") == "top_p"
    await page.fill("[name=top_p]", "")
    await page.fill("[name=prompt]", "x" * 20_000)
    await page.click("#send")
    await page.until("document.querySelector('[aria-invalid]')?.name === 'prompt'")


async def test_a_server_with_keys_under_load(program: str, page: Page, tmp_path: Path) -> None:
    """The key is asked for and kept in the tab; what runs is seen while it runs, and is stopped by a button."""
    del program
    (tmp_path / "keys").write_text(f"{KEY} alice\n")
    simulated = ("model.device=simulated", "simulated.step_ms=40", f"auth.api_keys={tmp_path / 'keys'}")
    with serving(tmp_path, *simulated) as running:
        await page.open(f"{running.url}/")
        await page.until("document.querySelector('#key-dialog').open")
        await page.fill("#key-input", "sk-wrong-012345")
        await page.click("#key-form [type=submit]")
        await page.until("document.querySelector('#key-reason').textContent.includes('not accepted')")
        await page.fill("#key-input", KEY)
        await page.click("#key-form [type=submit]")
        await page.until("document.querySelector('#health').textContent === 'serving'")
        assert not await page.eval("document.querySelector('#key-dialog').open")
        assert await page.eval("[location.href, document.cookie, localStorage.length].join()") == f"{running.url}/,,0"

        await page.fill("[name=n]", "32")
        await page.fill("[name=max_tokens]", "1900")
        await page.click("#send")
        await page.until(f"{TEXTS}.length === 32 && {TEXTS}.every((each) => each.textContent)")
        assert await page.text("#run-samples") == "0 / 32"
        await page.until("document.querySelector('#tile-running').textContent === '32'")
        await page.until("Number(document.querySelector('#tile-generated').textContent.replace(',', '')) > 300")
        await page.until("document.querySelector('#legend-cache').textContent.includes('≤')")
        label = "document.querySelector('#chart-sequences').getAttribute('aria-label')"
        await page.until(f"{label}.includes('running 32')")

        await page.click("#stop")
        await page.until(f"{STATUS} === 'stopped'")
        await page.until("document.querySelector('#tile-running').textContent === '0'")
        await page.open(f"{running.url}/")  # the tab still has it
        await page.until("document.querySelector('#health').textContent === 'serving'")
        assert all("401" in complaint for complaint in page.complaints), page.complaints
        assert KEY not in running.said()


VOTES = {
    "number": {
        "so 60 books.\n#### 60": "60",
        "it is $1,234.50.": "1234.5",
        "5-3": "3",
        "x = -7": "-7",
        "1,2 and 12,34": "34",
        "3.0": "3",
        "12345678901234567890": "12345678901234567890",
        "no idea": None,
    },
    "line": {"a\n\n  b  \n \n": "b", " \n": None},
}


async def test_final_answers(server: Serving, page: Page) -> None:
    await page.open(f"{server.url}/")
    for kind, answers in VOTES.items():
        for text, answer in answers.items():
            script = f"import('/page/vote.js').then(({{FINAL}}) => FINAL.{kind}({json.dumps(text)}) ?? null)"
            assert await page.eval(script) == answer, text
    tally = "import('/page/vote.js').then(({tally}) => tally(['a', 'b', undefined, 'b', 'c']))"
    assert await page.eval(tally) == [["b", 2], ["a", 1], ["c", 1]]
