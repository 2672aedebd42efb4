"""What a rank does of a trainer's actions: joins its groups, loads tensors, sums them up or reads them, and sleeps.

Called between steps, when none is queued. Every action ends with a ControlDone, whatever happens; a load that fails
closes its group, since the other end may be in the middle of a tensor. A GPU may still copy when the next action
begins. Knows no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from toka_async.control import (
    AbandonUpdate,
    AnyAction,
    BeginUpdate,
    Broadcast,
    Checksum,
    CloseTransfer,
    Control,
    ControlDone,
    CudaBucket,
    Directory,
    GroupTransfer,
    LoadTensors,
    OpenTransfer,
    ReadTensor,
    ShmBucket,
    Sleep,
    VerifyUpdate,
    Wake,
)
from toka_async.memory.virtual import MemoryStaysError
from toka_async.model.decoder import RankModel
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.errors import TransferError
from toka_async.transfer.nccl import join_nccl
from toka_async.transfer.shared import OpenBuckets, read_tensors
from toka_async.transfer.tensors import TensorInfo, read_infos
from toka_async.transfer.torch_group import join_torch_group
from toka_async.transfer.wire import BroadcastGroup, receive_tensors
from toka_async.weights.catalog import UpdateError, WeightCatalog
from toka_async.weights.checksums import sum_parts
from toka_async.weights.rows import read_rows
from toka_async.weights.update import WeightUpdate

logger = logging.getLogger(__name__)


class SleepingCache(Protocol):
    """The part of the KV cache, and of the states of recurrent layers, that sleeps."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes of a GPU that torch does not count."""
        ...

    def release(self) -> None: ...

    def restore(self) -> None: ...


class RankControl:
    """Carries out actions on one rank.

    Args:
        build_whole: builds the whole model of a dtype on the meta device. rank: in the replica. number: among all
            ranks of all replicas.
    """

    def __init__(
        self,
        decoder: RankModel,
        build_whole: Callable[[torch.dtype], RankModel],
        caches: Sequence[SleepingCache],
        rank: int,
        number: int,
    ) -> None:
        self._decoder = decoder
        self._build_whole = build_whole
        self._caches = caches
        self._rank = rank
        self._number = number
        parameter = next(decoder.parameters())
        self._device = parameter.device
        self._parts = dict(decoder.parts())
        self._catalog: WeightCatalog | None = None
        self._update: WeightUpdate | None = None
        self._groups: dict[str, BroadcastGroup] = {}
        self._buckets = OpenBuckets(self._device)  # of the open update

    def count_mapped_bytes(self) -> int:
        """Counts the bytes of a GPU that caches have now and torch does not count. Any thread may ask."""
        return sum(cache.mapped_bytes for cache in self._caches)

    def launch(self, control: Control) -> Callable[[], ControlDone]:
        """Carries out an action as far as it is the host's; returns what waits for the device."""
        before = self._count_written()
        error, done = "", ControlDone(number=control.number, rank=self._rank)
        try:
            done = self._run(control.action, done)
        except (TransferError, UpdateError, MemoryStaysError) as problem:
            error = str(problem)
        except Exception as problem:
            logger.exception("an action failed")
            error = f"{type(problem).__name__}: {problem}"
        done = replace(done, error=error, count=max(0, self._count_written() - before))
        if self._device.type != "cuda":
            return lambda: done
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()
        return partial(_wait, copied, done)  # only after this may a trainer overwrite a bucket

    def _count_written(self) -> int:
        return 0 if self._update is None else len(self._update.written)

    def _run(self, action: AnyAction, done: ControlDone) -> ControlDone:
        """Returns `done` with what was asked for."""
        match action:
            case OpenTransfer():
                self._open(action)
            case CloseTransfer(name=name):
                self._close(name)
            case BeginUpdate():
                self._end_update()
                self._update = WeightUpdate(self._decoder, self._parts, self._get_catalog())
            case LoadTensors():
                self._load(action)
            case VerifyUpdate(partial=partial):
                self._get_update().finish(partial)
                self._buckets.close()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # buffers of tensors, which the cache of keys and values left no room for
            case AbandonUpdate():
                self._end_update()
            case Checksum():
                return replace(done, sums=tuple(sum_parts(self._parts)))
            case ReadTensor(name=name, num_rows=num_rows):
                part = self._parts.get(self._get_catalog().find_name(name))
                return done if part is None else replace(done, rows=tuple(read_rows(name, part, num_rows)))
            case Sleep():
                for cache in self._caches:
                    cache.release()
            case Wake():
                for cache in self._caches:
                    cache.restore()
            case _:
                raise UpdateError(f"{type(action).__name__} is no action of a rank")
        return done

    def _get_catalog(self) -> WeightCatalog:
        self._catalog = self._catalog or WeightCatalog(self._build_whole(self._find_dtype()))
        return self._catalog

    def _find_dtype(self) -> torch.dtype:
        """That of the weights that are not quantized: embeddings and norms never are."""
        return next(part.target.dtype for part in self._parts.values() if part.target.itemsize > 1)

    def _end_update(self) -> None:
        self._update = None
        self._buckets.close()

    def _get_update(self) -> WeightUpdate:
        if self._update is None:
            raise UpdateError("no update has begun")
        return self._update

    # ---- groups

    def _open(self, action: OpenTransfer) -> None:
        transfer, deadline = action.transfer, Deadline(action.seconds)
        self._close(transfer.name)
        rank = transfer.rank_offset + self._number
        if not 0 < rank < transfer.world_size:
            raise TransferError(
                f"rank_offset={transfer.rank_offset}, world_size={transfer.world_size}: a rank of the engine would be "
                f"number {rank}"
            )
        if isinstance(transfer, GroupTransfer):
            if transfer.backend == "nccl" and self._device.type != "cuda":
                raise TransferError("backend=nccl needs ranks on GPUs; use gloo")
            self._groups[transfer.name] = join_torch_group(transfer, rank, self._device, deadline)
        else:
            if self._device.type != "cuda":
                raise TransferError("NCCL needs ranks on GPUs; use a group with backend gloo, or shared memory")
            self._groups[transfer.name] = join_nccl(transfer, rank, self._device, deadline)

    def _close(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            with suppress(RuntimeError, ValueError):  # its other end may be gone
                group.close()

    # ---- tensors

    def _load(self, action: LoadTensors) -> None:
        update, deadline, source = self._get_update(), Deadline(action.seconds), action.source
        if isinstance(source, Directory):
            update.read_directory(source.path)
            return
        try:
            infos = read_infos(action.names, action.dtypes, action.shapes)
            update.check(infos)
            update.write(self._receive(source, infos, deadline))
        except BaseException:
            if isinstance(source, Broadcast):
                self._close(source.transfer)
            raise

    def _receive(
        self, source: Broadcast | ShmBucket | CudaBucket, infos: list[TensorInfo], deadline: Deadline
    ) -> Iterable[tuple[str, Tensor]]:
        match source:
            case Broadcast(transfer=name, buffer_bytes=buffer_bytes):
                group = self._groups.get(name)
                if group is None:
                    raise TransferError(f"no transfer {name!r} is open")
                return receive_tensors(group, infos, deadline, buffer_bytes)
            case ShmBucket(offsets=offsets) | CudaBucket(offsets=offsets):
                return read_tensors(self._buckets.open(source), infos, offsets)


def _wait(copied: torch.cuda.Event, done: ControlDone) -> ControlDone:
    copied.synchronize()
    return done
