"""Commands of trainers over a real socket, on the fake scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.direct import direct_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.client import Client, CommandError, ConnectionLostError, Trainer
from toka_async.config import ZmqConfig
from toka_async.control import CudaBucket, CudaHandle, Directory, GroupTransfer
from toka_async.procs.direct import make_admin_check
from toka_async.transport.curve import make_keys, read_public

ADMIN: dict[str, Any] = {"admin": True}


async def test_a_trainer_has_a_method_for_each_command() -> None:
    scheduler = FakeScheduler()
    async with direct_server(scheduler, **ADMIN) as world, Client(world.url) as client:
        trainer = Trainer(client)
        state = await trainer.state()
        assert (state.is_paused, state.weight_version, state.world_size) == (False, "default", 1)
        await trainer.pause("keep")
        assert (await trainer.state()).is_paused
        await trainer.begin_update()
        await trainer.load(Directory(path="/new"))
        await trainer.finish_update("v1")
        await trainer.begin_update(partial=True)
        assert (await trainer.state()).is_updating
        await trainer.abandon_update()
        await trainer.set_version("v2")
        await trainer.sleep(1, "abort")
        assert (await trainer.state()).is_asleep
        await trainer.wake()
        await trainer.reset_prefix_cache()
        transfer = GroupTransfer(address="a", port=1, rank_offset=1, world_size=2, backend="gloo")
        await trainer.open_transfer(transfer, timeout=30)
        await trainer.close_transfer(transfer.name)
        assert await trainer.checksum() == {"w": f"{5:016x}"}
        await trainer.resume()
        assert (await trainer.state()).weight_version == "v2"
    acts = (
        "Pause BeginUpdate LoadTensors VerifyUpdate CommitUpdate BeginUpdate AbandonUpdate SetVersion Pause Sleep Wake"
    )
    assert scheduler.acts == [
        *acts.split(),
        *("ResetPrefixCache", "OpenTransfer", "CloseTransfer", "Checksum", "Resume"),
    ]


async def test_requests_are_aborted_by_their_ids_whether_their_text_is_wanted_or_not() -> None:
    async with direct_server(**ADMIN) as world, Client(world.url) as client:
        trainer = Trainer(client)
        await trainer.pause("keep")
        texts = [asyncio.create_task(client.generate([1, 2], max_tokens=400, text=text)) for text in (True, False)]
        other = asyncio.create_task(client.generate([1, 2, 3], max_tokens=4, text=False))
        while world.engine.num_requests < 3:
            await asyncio.sleep(0)
        assert await trainer.abort(ids=[0, 1, 77]) == 2
        assert {(await task).samples[0].finish_reason for task in texts} == {"abort"}
        await trainer.resume()
        assert (await other).samples[0].finish_reason == "length"
        assert await trainer.abort() == 0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("explode", {}, "there is no command 'explode'; there are: state, abort, pause"),
        ("pause", {"mode": "loudly"}, "pause: Invalid enum value 'loudly'"),
        ("pause", {"colour": "red"}, "pause: Object contains unknown field `colour`"),
        ("load", {}, "load: Object missing required field `source`"),
        ("load", {"source": ["Nowhere"]}, "load: Invalid value 'Nowhere'"),
        ("load", {"source": ["Directory", "/x"]}, "no update of the weights is open"),
        ("set_version", [1], "set_version: Expected `object`, got `array`"),
    ],
)
async def test_wrong_commands_are_refused(name: str, args: Any, message: str) -> None:
    async with direct_server(**ADMIN) as world, Client(world.url) as client:
        with pytest.raises(CommandError, match=message):
            await client.command(name, args)


async def test_handles_of_gpus_travel_as_numbers() -> None:
    handle = CudaHandle(gpu="u", handle=b"1", size=2, offset=3, counter=b"4", counter_offset=5, event=b"6", waits=True)
    async with direct_server(**ADMIN) as world, Client(world.url) as client:
        trainer = Trainer(client)
        await trainer.begin_update()
        await trainer.load(CudaBucket(handles=(handle,), offsets=(0,)))


async def test_without_server_admin_nobody_commands() -> None:
    async with direct_server() as world, Client(world.url) as client:
        with pytest.raises(CommandError, match=r"takes no commands here: server\.admin"):
            await Trainer(client).pause()


async def test_a_break_leaves_nobody_waiting_for_an_answer() -> None:
    async with direct_server(FakeScheduler(held=True), **ADMIN) as world:
        async with Client(world.url) as client:
            task = asyncio.create_task(Trainer(client).pause("keep"))
            while not world.engine.control.is_paused:
                await asyncio.sleep(0)
        with pytest.raises(ConnectionLostError):
            await task
        with pytest.raises(ConnectionLostError):
            await Trainer(client).resume()


def test_admins_are_those_whose_keys_are_in_their_folder(tmp_path: Path) -> None:
    clients, admins = tmp_path / "clients", tmp_path / "admins"
    other, key = (read_public(make_keys(folder, "key")[0]).decode() for folder in (clients, admins))
    config: dict[str, Any] = {"bind": "tcp://127.0.0.1:1", "key": "x", "clients": str(clients)}
    assert make_admin_check(ZmqConfig())("")
    assert not make_admin_check(ZmqConfig(insecure=True))("")
    assert not make_admin_check(ZmqConfig(**config))(key)
    check = make_admin_check(ZmqConfig(**config, admins=str(admins)))
    assert check(key)
    assert not check(other)
    assert not check("")
