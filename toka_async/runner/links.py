"""Tensors from one rank to another, in order, without the host waiting for them: what joins the stages of a pipeline.

A link is a process group of two, for one direction. On GPUs NCCL's streams do the waiting: whoever takes what was
received makes the stream that computes wait for it, and nothing that a sender still reads is written again. On CPUs
(gloo) the host waits. Buffers stay where they are. Knows no rows and no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class _Place:
    """A buffer of a ring. free: an event on the device, when what was received last is read. work: what uses it."""

    buffer: Tensor
    free: torch.cuda.Event | None
    work: dist.Work | None = None


class Sender:
    """The end of a link that sends: copies, so that what is sent can be written again at once."""

    def __init__(self, group: dist.ProcessGroup, target: int, buffers: Sequence[Tensor]) -> None:
        """target: the rank in the group. buffers: as many as may be on their way, each of the longest [n, …]."""
        self._group = group
        self._target = target
        self._ring = deque(_Place(buffer, None) for buffer in buffers)

    def send(self, x: Tensor) -> None:
        """[n, …], n >= 1."""
        place = self._ring[0]
        self._ring.rotate(-1)
        if place.work is not None:
            place.work.wait()
        view = place.buffer[: len(x)]
        view.copy_(x)
        place.work = dist.isend(view, group=self._group, group_dst=self._target)


class Receiver:
    """The end of a link that receives: what is posted is received as it comes, and taken in the order of posting.

    A receive may be posted once everything that its sender waits for is launched here: whatever the device is told to
    do after it may wait for it.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, buffers: Sequence[Tensor]) -> None:
        """source: the rank in the group. buffers: as many as may be posted and not released."""
        self._group = group
        self._source = source
        self._on_gpu = buffers[0].device.type == "cuda"
        self._free = deque(_Place(buffer, self._event()) for buffer in buffers)
        self._posted: deque[tuple[_Place, int]] = deque()
        self._taken: deque[_Place] = deque()
        # NCCL begins to receive when the stream that asks gets there: not the one that computes, which is busy.
        self._stream = torch.cuda.Stream(buffers[0].device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def is_full(self) -> bool:
        """Nothing can be posted until something is released."""
        return not self._free

    @property
    def num_posted(self) -> int:
        """That were not taken."""
        return len(self._posted)

    def post(self, count: int) -> None:
        """Receive [count, …], count >= 1, as soon as it comes."""
        place = self._free.popleft()
        view = place.buffer[:count]
        if self._stream is None:
            place.work = dist.irecv(view, group=self._group, group_src=self._source)
        else:
            assert place.free is not None
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(place.free)
                place.work = dist.irecv(view, group=self._group, group_src=self._source)
        self._posted.append((place, count))

    def take(self) -> Tensor:
        """What was posted first, once it is there; it stays until it is released."""
        place, count = self._posted.popleft()
        assert place.work is not None
        place.work.wait()
        self._taken.append(place)
        return place.buffer[:count]

    def release(self) -> None:
        """What was taken first is read, as soon as the device has done what it was told until now."""
        place = self._taken.popleft()
        if place.free is not None:
            place.free.record()
        self._free.append(place)

    def discard(self) -> None:
        """Take and release all that is posted: nobody wants it any more."""
        while self._posted:
            self.take()
            self.release()

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]


@dataclass(slots=True, frozen=True)
class StageLinks:
    """A rank's links to the equal ranks of other stages; None where there is none.

    before, after: residuals from the stage before and to the one after it, [t, hidden]. tokens_from_last, on the first
    stage, and tokens_to_first, on the last: what was sampled, int64 [s].
    """

    before: Receiver | None = None
    after: Sender | None = None
    tokens_from_last: Receiver | None = None
    tokens_to_first: Sender | None = None
