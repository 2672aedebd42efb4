"""What a trainer does with a server: pauses it, gives it new weights, and lets it go on.

Tensors go through memory that both share, a folder, or a group of the trainer; see transfer/. Loads torch only to send
tensors.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from toka_async.client.client import Client
from toka_async.client.errors import CommandError, ConnectionLostError
from toka_async.control import Directory, PauseMode, Source, Transfer
from toka_async.protocol import EngineState

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from toka_async.transfer.buckets import BucketWriter, Filling
    from toka_async.transfer.tensors import TensorInfo

BUCKET_BYTES = 1 << 28
NUM_BUCKETS = 4  # of an update; orders and answers of some are on their way while one is filled


class Trainer:
    """Commands over a client's connection. All raise CommandError or ConnectionLostError.

    After ConnectionLostError nobody knows whether the command was carried out: ask for `state`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def _ask(self, command: str, /, **args: object) -> Any:
        return await self._client.command(command, args)

    async def state(self) -> EngineState:
        return msgspec.convert(await self._ask("state"), EngineState)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Wait until nothing is computed any more. abort: requests end, with the tokens that they have. wait: those
        that have begun run to their ends. keep: they stay where they are. retract: they compute their keys and values
        again after `resume`.
        """
        await self._ask("pause", mode=mode)

    async def resume(self) -> None:
        await self._ask("resume")

    async def abort(self, ids: Sequence[int] | None = None, names: Sequence[str] | None = None) -> int:
        """End requests with the tokens that they have: of this client by their ids, of HTTP by their names, or all.

        Returns their number.
        """
        count: int = await self._ask("abort", ids=ids, names=names)
        return count

    async def reset_prefix_cache(self) -> None:
        """New prompts find nothing of earlier ones."""
        await self._ask("reset_prefix_cache")

    async def checksum(self) -> dict[str, str]:
        """Sums of all tensors, as `toka_async.transfer.checksum.sum_tensors` computes them."""
        sums: dict[str, str] = await self._ask("checksum")
        return sums

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and from level 1 on give the memory of the cache back."""
        await self._ask("sleep", level=level, mode=mode)

    async def wake(self) -> None:
        """Take the memory again; the engine stays paused."""
        await self._ask("wake")

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def open_transfer(self, transfer: Transfer, timeout: float | None = None) -> None:
        """Let all ranks join a group of which this trainer is rank 0; it joins at the same time, in so many seconds."""
        await self._ask("open_transfer", transfer=transfer, timeout=timeout)

    async def close_transfer(self, name: str) -> None:
        await self._ask("close_transfer", name=name)

    async def begin_update(self, partial: bool = False) -> None:
        """Stop computing until the update is finished. partial: it may have some tensors only."""
        await self._ask("begin_update", partial=partial)

    async def load(self, source: Source, infos: Iterable[TensorInfo] = ()) -> None:
        """Load whole tensors from a source."""
        infos = list(infos)
        await self._ask(
            "load",
            source=source,
            names=[info.name for info in infos],
            dtypes=[str(info.dtype).removeprefix("torch.") for info in infos],
            shapes=[info.shape for info in infos],
        )

    async def finish_update(self, version: str | None = None) -> None:
        """Use the new weights, under a version's name if one is given."""
        await self._ask("finish_update", version=version)

    async def abandon_update(self) -> None:
        await self._ask("abandon_update")

    async def set_version(self, version: str) -> None:
        await self._ask("set_version", version=version)

    async def update(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device | None = None,
    ) -> None:
        """Give a server on this machine all tensors of a checkpoint, through buckets of so many bytes each.

        They are in shared memory of the host, or of a GPU that a rank of the server uses too and that has the tensors.
        There are NUM_BUCKETS of them: one is filled while the server loads others. Larger ones are faster on a GPU, if
        it has the room for all of them.
        """
        from toka_async.transfer.buckets import CudaWriter, ShmWriter, fill_in_turn

        begun = asyncio.create_task(self.begin_update())
        await asyncio.sleep(0)  # it is sent: the server's steps end while the first bucket is filled
        writers: list[BucketWriter] = []
        try:
            for _ in range(NUM_BUCKETS):
                name = f"toka-{os.getpid()}-{secrets.token_hex(8)}"
                writers.append(CudaWriter(bucket_bytes, device) if device else ShmWriter(name, bucket_bytes))
            await self._load_in_turn(begun, fill_in_turn(writers, tensors))
        except CommandError:  # no update has begun, or the engine has given it up
            raise
        except BaseException:
            with suppress(CommandError, ConnectionLostError):
                await begun
                await self.abandon_update()
            raise
        finally:
            for writer in writers:
                writer.close()
        await self.finish_update(version)

    async def _load_in_turn(self, begun: Awaitable[None], fillings: Iterable[tuple[Filling, BucketWriter]]) -> None:
        """Load fillings of the buckets in turn. The server has the next one already when it has loaded one.

        A filling is sent while the next one is filled: a GPU copies it meanwhile.
        """
        loads: deque[asyncio.Task[None]] = deque()
        ahead: tuple[Filling, BucketWriter] | None = None

        async def send(filling: Filling, writer: BucketWriter) -> None:
            await begun  # before it, an open update may be another trainer's
            infos, bucket = filling
            writer.wait()
            loads.append(asyncio.create_task(self.load(bucket, infos)))
            await asyncio.sleep(0)  # it is sent

        async def collect(most: int) -> None:
            """Wait until at most so many loads are under way."""
            while len(loads) > most:
                await loads[0]
                loads.popleft()

        try:
            for filled in fillings:
                if ahead is not None:
                    await send(*ahead)
                ahead = filled
                # Of the buckets, one has what is not sent yet, and the next filling needs another one.
                await collect(NUM_BUCKETS - 2)
            if ahead is not None:
                await send(*ahead)
            await begun
            await collect(0)
        finally:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)

    async def update_from(self, folder: Path | str, version: str | None = None) -> None:
        """Give a server the tensors of a folder's safetensors files."""
        await self.begin_update()
        await self.load(Directory(path=str(folder)))
        await self.finish_update(version)
