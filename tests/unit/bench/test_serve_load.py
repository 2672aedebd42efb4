"""The loads against the web application with a scheduler that makes tokens up."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.drivers.until import until
from tests.drivers.web_server import NAME, web_server
from tests.fakes.scheduler import READY, FakeScheduler
from tests.unit.bench.conftest import Parse
from toka_async.bench import serve_load
from toka_async.bench.client import ListedModel, Reply, Sent
from toka_async.bench.loads.workloads import Body
from toka_async.bench.rates import Rates
from toka_async.bench.serve_load import (
    LoadPercentiles,
    ServeLoadResult,
    fit_samples,
    measure,
    percentiles,
    stream_rate,
)

LARGE = msgspec.structs.replace(READY, num_pages=8192, max_context=20000)


async def run(options: argparse.Namespace) -> list[ServeLoadResult]:
    async with web_server(FakeScheduler(ready=LARGE)) as server:
        options.url = server.url
        return (await measure(options))[0]


async def test_samples(parse: Parse) -> None:
    options = parse(
        "serve-load",
        "--prompts",
        "2",
        "--shots",
        "1",
        "--samples",
        "5",
        "--output-tokens",
        "6",
        "--repeat",
        "2",
        "--warm",
    )
    results = await run(options)
    assert len(results) == 2
    for result in results:
        assert (result.requests, result.sequences, result.output_tokens, result.errors) == (2, 10, 60, 0)
        assert result.seconds == pytest.approx(60 / result.tokens_per_second, abs=0.001)  # it is rounded
        assert result.latency is not None
        assert 0 < result.latency.p50 <= result.latency.max <= result.seconds + 0.001  # both are rounded
        assert result.first_token is None
        assert (result.model, result.wasted_share) == (NAME, 0.0)
        assert result.server["generation_tokens_total"] == 60  # those of other runs are not counted
    assert json.loads(msgspec.json.encode(results[0]))["options"]["samples"] == 5


async def test_a_trace_and_log_probs(parse: Parse, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("ContextTokens,GeneratedTokens\n30,4\n10,7\n20,1\n")
    options = parse("serve-load", "--load", "trace", "--trace", str(path), "--requests", "3", "--logprobs", "1")
    (result,) = await run(options)
    assert (result.requests, result.prompt_tokens, result.output_tokens, result.errors) == (3, 60, 12, 0)


async def test_one_user(parse: Parse) -> None:
    options = parse("serve-load", "--load", "single", "--requests", "3", "--output-tokens", "5", "--shots", "1")
    (result,) = await run(options)
    assert (result.output_tokens, result.errors) == (15, 0)
    assert result.first_token is not None
    assert result.first_token.p50 > 0
    assert result.stream_tokens_per_second is not None


async def test_samples_that_end_by_themselves(parse: Parse) -> None:
    arguments = ["--load", "ends", "--prompts", "2", "--samples", "40", "--shots", "1", "--mean-tokens", "20"]
    (result,) = await run(parse("serve-load", *arguments))
    assert result.errors == 0
    assert 80 * 5 < result.output_tokens < 80 * 80


async def test_rollouts(parse: Parse) -> None:
    (result,) = await run(
        parse("serve-load", "--load", "rollouts", "--prompts", "3", "--samples", "4", "--mean-tokens", "5")
    )
    assert (result.requests, result.sequences, result.errors) == (12, 12, 0)
    assert result.sample_ends is not None
    assert result.group_ends is not None
    assert 0 < result.sample_ends.p50 <= result.sample_ends.max <= result.seconds + 0.001  # rounded
    assert result.group_ends.p50 >= result.sample_ends.p50
    assert result.group_ends.max == result.sample_ends.max


async def test_errors_are_counted(parse: Parse) -> None:
    (result,) = await run(parse("serve-load", "--model", "another", "--prompts", "3", "--shots", "1", "--samples", "2"))
    assert (result.errors, result.output_tokens) == (3, 0)
    assert "404" in result.first_error


@pytest.mark.parametrize(
    ("bodies", "error"),
    [
        (
            [b'{"choices":[{"index":0,"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}'],
            "1 of 2",
        ),
        ([b'{"choices":[{"index":0,"finish_reason":"stop"},{"index":1,"finish_reason":"stop"}]}'], "no usage"),
        ([b'{"error":{"message":"sorry"}}'], "sorry"),
        ([b"{"], "truncated"),
    ],
)
def test_an_answer_that_lacks_something(bodies: list[bytes], error: str) -> None:
    reply = Reply(2, bodies=bodies)
    reply.decode()
    assert error in reply.error


def test_numbers() -> None:
    assert percentiles([]) is None
    found = percentiles(range(1, 201))
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == (101, 181, 199, 200)
    assert stream_rate(Reply(1, first=1.0, last=3.0, output_tokens=101)) == 50
    assert stream_rate(Reply(2, first=1.0, last=3.0, output_tokens=101)) is None


@pytest.mark.parametrize(("errors", "code"), [(0, 0), (1, 1)])
def test_the_median_run_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, parse: Parse, errors: int, code: int
) -> None:
    async def measured(_options: argparse.Namespace) -> tuple[list[ServeLoadResult], list[Rates]]:
        rates = (30.0, 10.0, 20.0)
        return [
            ServeLoadResult(
                tokens_per_second=rate, seconds=1.0, output_tokens=1, prompt_tokens=1, requests=1, sequences=1,
                errors=errors * (rate == 10.0), first_error="no" * errors * (rate == 10.0),
            )
            for rate in rates
        ], []  # fmt: skip

    monkeypatch.setattr(serve_load, "measure", measured)
    assert serve_load.main(parse("serve-load", "--json", "--repeat", "3")) == code
    printed = json.loads(capsys.readouterr().out)
    assert (printed["tokens_per_second"], printed["runs"]) == (20.0, [30.0, 10.0, 20.0])
    assert (printed["errors"], printed["first_error"]) == (errors, "no" * errors)


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, parse: Parse) -> None:
    async def measured(_options: argparse.Namespace) -> tuple[list[ServeLoadResult], list[Rates]]:
        figures = LoadPercentiles(0.5, 1.25, 2.0, 1234.5)
        counted = {"prefix_cache_queries_total": 200.0, "prefix_cache_hits_total": 150.0, "steps_total": 4.0}
        return [
            ServeLoadResult(
                tokens_per_second=12345.6, seconds=10.0, output_tokens=123456, prompt_tokens=77, requests=16,
                sequences=64, errors=0, ended=3, interrupted=True, latency=figures, wasted_share=0.015, load="samples",
                model="m", server=counted | {"step_seconds_total": 0.1, "num_preemptions_total": 2.0},
            )
        ], []  # fmt: skip

    monkeypatch.setattr(serve_load, "measure", measured)
    assert serve_load.main(parse("serve-load")) == 130
    lines = {tuple(line[:27].split()): line[27:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines["tokens/s",] == ["12,346"]
    assert lines["interrupted",] == ["3", "of", "16", "requests", "had", "ended"]
    assert lines["prompt", "tokens", "saved"][0] == "75.0%"
    assert lines["tokens", "after", "the", "end"][0] == "1.50%"
    assert lines["steps",] == ["4", "of", "25", "ms"]
    assert lines[()] == ["p50", "p90", "p99", "max"]
    assert lines["latency,", "s"] == ["0.5", "1.25", "2", "1,234"]
    assert not any("{" in word for words in lines.values() for word in words)


@pytest.mark.parametrize(("rate", "samples"), [(10.0, 16), (7000.0, 128), (1e9, 1024)])
async def test_the_load_fits_the_server(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, rate: float, samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow servers are not asked for minutes of work, fast ones for as much as ever."""
    asked: list[int] = []

    async def sent(_session: object, _url: str, bodies: list[Body], _limit: int, _on_end: object = None) -> Sent:
        (body,) = bodies
        asked.append(body["n"] * body["max_tokens"])
        return Sent(asked[-1] / rate, [Reply(body["n"], output_tokens=asked[-1], has_ended=True)], False)

    monkeypatch.setattr(serve_load, "send_all", sent)
    async with aiohttp.ClientSession() as session:
        options = parse("serve-load", "--shots", "1")
        assert await fit_samples(options, session, "http://127.0.0.1:9", ListedModel("m")) == samples
    assert asked == [256 * 32]
    assert f"16 prompts x {samples} samples" in capsys.readouterr().err


async def test_what_was_measured_survives_an_interruption(parse: Parse) -> None:
    """The server's own count says what had been generated by then."""
    scheduler = FakeScheduler(ready=LARGE, held=True)
    async with web_server(scheduler) as server:
        arguments = ["--prompts", "2", "--samples", "3", "--output-tokens", "9", "--shots", "1", "--url", server.url]
        measuring = asyncio.create_task(measure(parse("serve-load", *arguments)))
        await until(lambda: server.engine.num_requests == 2)
        scheduler.step()
        measuring.cancel()
        ((result,), _) = await measuring
    assert (result.interrupted, result.requests, result.ended, result.errors) == (True, 2, 0, 0)
    assert result.output_tokens == 6
    assert result.latency is None


async def test_nothing_is_told_of_a_load_that_is_not_measured(parse: Parse) -> None:
    async with web_server(FakeScheduler(ready=LARGE, held=True)) as server:
        arguments = ["--warm", "--prompts", "2", "--samples", "3", "--shots", "1", "--url", server.url]
        measuring = asyncio.create_task(measure(parse("serve-load", *arguments)))
        await until(lambda: server.engine.num_requests == 2)
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring
