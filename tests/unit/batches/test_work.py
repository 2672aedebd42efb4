"""Batches from their creation to their end, and through restarts, with answers that need no engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drivers.running_batches import line, names, running
from tests.drivers.until import SECONDS, turns, until
from toka_async.batches import work
from toka_async.batches.records import FINAL, Batch, DoneLine
from toka_async.batches.store import InUseError, NotFoundError
from toka_async.server.limits.window import EngineLoad


async def test_every_line_ends_in_one_of_the_files(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        await it.create([line(number) | ({"url": "/other"} if number % 5 == 0 else {}) for number in range(300)])
        batch = await it.end()
        assert batch.record.status == "completed"
        assert (batch.record.total, batch.progress.completed, batch.progress.failed) == (300, 240, 60)
        assert (batch.progress.input_tokens, batch.progress.output_tokens) == (720, 240)
        assert it.ids("b-out") == names(number for number in range(300) if number % 5)
        assert it.ids("b-err") == names(range(0, 300, 5))
        first = it.results("b-out")[0]
        assert first["response"] == {"status_code": 200, "request_id": f"req_{first['id'][10:]}", "body": {"text": "2"}}
        assert first["error"] is None
        assert it.store.file("b-out").purpose == "batch_output"


async def test_without_errors_there_is_no_error_file(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        await it.create([line(1)])
        await it.end()
        with pytest.raises(NotFoundError):
            it.store.file("b-err")
        assert not it.store.path("b-err").exists()


async def test_a_file_that_is_no_batch_fails_before_anything_runs(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        await it.create([line(1), b"nonsense", line(1)])
        batch = await it.end()
        assert batch.record.status == "failed"
        assert [(fault.code, fault.line) for fault in batch.record.faults] == [("invalid_json_line", 2)]
        assert not it.answers.asked
        assert [each.name for each in (tmp_path / "files").iterdir()] == ["file-b"]


async def test_a_stop_and_a_start_lose_and_repeat_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        it.answers.gate.clear()
        await it.create([line(number, seconds=0.001 * (number % 7)) for number in range(200)])
        await until(lambda: it.answers.num_running == 8 + 64)
        it.answers.gate.set()
        await until(lambda: it.answers.asked)
        assert it.answers.most_running == 8 + 64  # what can run, and what waits behind it
    async with running(tmp_path) as it:
        batch = await it.end()
        assert batch.progress.completed == 200
        assert it.ids("b-out") == names(range(200))
        assert 0 < it.answers.asked.total() < 200  # what was done is not asked again


async def test_nothing_is_asked_while_the_engine_takes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, rows=0) as it:
        await it.create([line(number) for number in range(20)])
        await it.until(lambda batch: batch.record.status == "in_progress")
        await turns(50)
        assert not it.answers.asked
        it.window.report(EngineLoad(4))
        assert (await it.end()).progress.completed == 20


@pytest.mark.parametrize("restart", [False, True])
async def test_a_cancelled_batch_says_so_of_every_line_that_is_left(tmp_path: Path, restart: bool) -> None:
    async with running(tmp_path) as it:
        await it.create([line(number, seconds=0.0 if number < 50 else 60.0) for number in range(9000)])
        await it.until(lambda batch: batch.progress.completed == 50)
        assert (await it.batches.cancel("b")).record.status == "cancelling"
        if not restart:
            batch = await it.end()
    if restart:
        async with running(tmp_path) as it:
            batch = await it.end()
    assert batch.record.status == "cancelled"
    assert (batch.progress.completed, batch.progress.failed) == (50, 8950)
    assert it.ids("b-out") == names(range(50))
    assert it.ids("b-err") == names(range(50, 9000))
    assert {result["error"]["code"] for result in it.results("b-err")} == {"batch_cancelled"}


async def test_a_batch_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LONGEST_SLEEP", 0.01)
    async with running(tmp_path) as it:
        await it.create([line(1, seconds=60.0), line(2)], expires_at=int(time.time()) + 3600)
        await it.until(lambda batch: batch.progress.completed == 1)
        it.ahead = 4000.0
        batch = await it.end()
        assert batch.record.status == "expired"
        assert batch.record.expired_at is not None
        assert it.ids("b-out") == names([2])
        (expired,) = it.results("b-err")
        assert expired["error"]["code"] == "batch_expired"


@pytest.mark.parametrize(("jump", "waits"), [(4000.0, False), (-4000.0, True)])
async def test_expiry_follows_a_wall_clock_that_jumps(
    monkeypatch: pytest.MonkeyPatch, jump: float, waits: bool
) -> None:
    """Forward: it has expired soon after. Back: it has not, whatever was reckoned before."""
    now, asked = 1_000_000.0, list[float]()
    monkeypatch.setattr(work, "LONGEST_SLEEP", 0.01)

    def clock() -> float:
        asked.append(now)
        return now

    never = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(work.wait_until({never}, 1_000_000 + (3600 if jump > 0 else 1), clock))
    await until(lambda: asked)
    assert not waiting.done()
    now += jump
    await until(lambda: asked.count(now) >= 2 or waiting.done())
    assert waiting.done() != waits
    now = 1_000_000.0 + 3600
    await asyncio.wait_for(waiting, SECONDS)


async def test_a_batch_that_is_cancelled_before_it_was_looked_at(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        async with it.batches._passes[""]:
            await it.create([line(1)])
            await it.batches.cancel("b")
        batch = await it.end()
        assert batch.record.status == "cancelled"
        assert not it.answers.asked
        assert (await it.batches.cancel("b")).record == batch.record


async def test_an_error_of_this_program_ends_its_batch(tmp_path: Path) -> None:
    """It has failed, can be deleted, and so can its input. Nothing of it counts, not even a line that never began."""
    async with running(tmp_path) as it:
        await it.create([line(1), line(2, breaks=True), line(3)], "broken")
        await it.create([line(4)], "good")
        ended = {batch.record.id: batch.record for batch in (await it.end(), await it.end())}
        assert ended["good"].status == "completed"
        assert [fault.code for fault in ended["broken"].faults] == ["internal_error"]
        assert it.window.in_flight == 0
        await it.batches.writer.run(lambda: it.store.remove_file("file-broken"))
        await it.batches.writer.run(lambda: it.store.remove_batch("broken"))
        with pytest.raises(NotFoundError):
            await it.batch("broken")


async def test_lines_that_cannot_be_kept_end_their_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as it:
        finish_lines = it.store.finish_lines

        def finish(batch_id: str, lines: Sequence[DoneLine]) -> Batch:
            assert batch_id != "broken"
            return finish_lines(batch_id, lines)

        monkeypatch.setattr(it.store, "finish_lines", finish)
        await it.create([line(number, seconds=0.01 * number) for number in range(20)], "broken")
        await it.create([line(number) for number in range(20)], "good")
        ended = {batch.record.id: batch for batch in (await it.end(), await it.end())}
        assert [fault.code for fault in ended["broken"].record.faults] == ["internal_error"]
        assert ended["good"].progress.completed == 20


async def test_owners_have_slots_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many batches as run at once, with lines that never end, are in nobody else's way."""
    monkeypatch.setattr(work, "MAX_RUNNING", 2)
    async with running(tmp_path) as it:
        for number in range(4):
            await it.create([line(1, seconds=60.0)], f"a{number}", owner="name alice")
        await it.create([line(1)], "b", owner="name bob")
        assert (await it.end()).record.id == "b"
        assert it.answers.num_running == 2


async def test_an_owner_checks_one_file_at_a_time(tmp_path: Path) -> None:
    async with running(tmp_path) as it, it.batches._passes["name alice"]:
        await it.create([line(1)], "a", owner="name alice")
        await it.create([line(1)], "b", owner="name bob")
        assert (await it.end()).record.id == "b"
        assert (await it.batch("a")).record.status == "validating"
        it.batches.suspend()


async def test_one_owners_many_lines_do_not_stand_before_anothers(tmp_path: Path) -> None:
    """However many batches they are in, the owners' lines enter in turn."""
    async with running(tmp_path, rows=0) as it:
        for number in range(6):
            await it.create([line(each, n=100) for each in range(30)], f"a{number}", owner="name alice")
        await it.create([line(each, n=100) for each in range(100, 130)], "b", owner="name bob")
        for name in ("a0", "a1", "a2", "a3", "a4", "a5", "b"):
            await it.until(lambda batch: batch.record.status != "validating", name)
        accounts = it.answers.accounts
        owners = [accounts.batches_of(accounts.open(f"name {name}")) for name in ("alice", "bob")]
        await until(lambda: [each.num_waiting for each in owners] == [6, 1])  # each batch's first line
        it.window.report(EngineLoad(1))
        # Among the first, and not the last of seven: a turn passes by while the next line is read, on a busy machine.
        assert "b" in [(await it.end()).record.id for _ in range(3)]


async def test_batches_take_turns(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        await it.create([line(number, seconds=0.005) for number in range(2000)], "large")
        await it.create([line(number) for number in range(10)], "small")
        assert (await it.end()).record.id == "small"


async def test_more_batches_than_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MAX_RUNNING", 2)
    async with running(tmp_path) as it:
        it.answers.gate.clear()
        for number in range(5):
            await it.create([line(number)], f"b{number}")
        await it.batches.cancel("b4")  # though it waits behind others
        assert (await it.end()).record.id == "b4"
        it.answers.gate.set()
        assert sorted([(await it.end()).record.id for _ in range(4)]) == ["b0", "b1", "b2", "b3"]


async def test_an_input_file_that_is_needed_stays(tmp_path: Path) -> None:
    async with running(tmp_path, rows=0) as it:
        await it.create([line(1)])
        with pytest.raises(InUseError, match="b"):
            await it.batches.writer.run(lambda: it.store.remove_file("file-b"))
        it.window.report(EngineLoad(1))
        await it.end()
        await it.batches.writer.run(lambda: it.store.remove_file("file-b"))
        assert not it.store.path("file-b").exists()


async def test_all_end_states_are_final(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        await it.create([line(1)], "a")
        await it.create([b"no"], "b")
        assert {(await it.end()).record.status for _ in range(2)} <= FINAL
    async with running(tmp_path) as it:
        assert (await it.batch("b")).record.status in FINAL
        await turns(50)
        assert it.ended.empty()
