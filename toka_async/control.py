"""Control of the engine by a trainer: pauses, aborts, new weights, sleep. The messages from the server to all replicas.

A `Control` goes to the scheduler of each replica, in order with its requests. The scheduler carries out what concerns
requests itself, and sends the rest to its ranks when no step is queued there, so that no step sees half of it. Each
scheduler answers once, with a `ControlDone`. Knows no sockets and no component's state.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from toka_async.arrays import EMPTY

DEFAULT_VERSION = "default"  # of the weights that a start loads, as vLLM names it

PauseMode = Literal["abort", "wait", "keep", "retract"]


class Action(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True, kw_only=True):
    """What is to be done: positional on the wire, tagged with its class's name."""


# ---- the scheduler's -------------------------------------------------------------------------------------------------


class Pause(Action, frozen=True, kw_only=True):
    """Compute no steps until Resume; requests that come meanwhile wait. Done when no step is queued any more.

    mode: what becomes of requests. abort: all end with `Reason.ABORT` and the tokens that they have. wait: those that
    have begun run to their ends, the others wait. keep: all stay where they are, with their keys and values. retract:
    all wait, and compute their keys and values again from their tokens.
    """

    mode: PauseMode


class Resume(Action, frozen=True, kw_only=True):
    """Go on."""


class Abort(Action, frozen=True, kw_only=True):
    """End requests with `Reason.ABORT` and the tokens that they have. `count` of the answer: requests that ended so."""

    request_ids: memoryview = EMPTY  # int32 [r]
    everything: bool = False  # all requests, whatever `request_ids` has


class ResetPrefixCache(Action, frozen=True, kw_only=True):
    """New prompts find nothing of earlier ones. Rows that run keep their keys and values."""


class CommitUpdate(Action, frozen=True, kw_only=True):
    """The open update is complete on all ranks of all replicas: steps use its weights from now on."""

    version: str


class SetVersion(Action, frozen=True, kw_only=True):
    """Name the weights that are there."""

    version: str


# ---- the ranks', which the scheduler sends on ------------------------------------------------------------------------


class GroupTransfer(Action, frozen=True, kw_only=True):
    """A group of torch.distributed, as SGLang's trainers make it: the trainer is rank 0 and listens at the address.

    The engine's ranks have the numbers from `rank_offset` on, replica after replica.
    """

    name: str = "weight_update_group"
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: Literal["nccl", "gloo"] = "nccl"


class NcclTransfer(Action, frozen=True, kw_only=True):
    """A communicator of NCCL, as vLLM's trainers make it; ranks as in GroupTransfer.

    Its id comes from a store at the address, or is given (`unique_id`, 128 bytes). packed: tensors come in chunks of
    just over `buffer_bytes`, otherwise one by one.
    """

    name: str = "nccl"
    address: str = ""
    port: int = 0
    unique_id: bytes = b""
    rank_offset: int
    world_size: int
    packed: bool = False
    buffer_bytes: int = 1 << 30


Transfer = GroupTransfer | NcclTransfer


class OpenTransfer(Action, frozen=True, kw_only=True):
    """Join the trainer's group. seconds: that this may take."""

    transfer: Transfer
    seconds: float


class CloseTransfer(Action, frozen=True, kw_only=True):
    """Leave a group; an unknown one is no error."""

    name: str


class BeginUpdate(Action, frozen=True, kw_only=True):
    """No step is computed until the update is committed or abandoned."""


class Broadcast(Action, frozen=True, kw_only=True):
    """The tensors come from the trainer's rank of an open transfer.

    buffer_bytes: of the chunks that they are packed in, 0 for none; -1: as the transfer was opened.
    """

    transfer: str
    buffer_bytes: int = -1


class ShmBucket(Action, frozen=True, kw_only=True):
    """The tensors are in POSIX shared memory: the file `name` of /dev/shm, each at its offset in bytes."""

    name: str
    offsets: tuple[int, ...]


class CudaHandle(Action, frozen=True, kw_only=True):
    """Memory of a GPU that another process shares: the numbers of torch's `UntypedStorage._share_cuda_`."""

    gpu: str  # UUID
    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool


class CudaBucket(Action, frozen=True, kw_only=True):
    """The tensors are in GPU memory that the trainer shares, each at its offset; a rank reads that of its own GPU."""

    handles: tuple[CudaHandle, ...]
    offsets: tuple[int, ...]


class Directory(Action, frozen=True, kw_only=True):
    """The tensors are in the safetensors files of a folder on each of the ranks' machines; the names are the files'."""

    path: str


Source = Broadcast | ShmBucket | CudaBucket | Directory


class LoadTensors(Action, frozen=True, kw_only=True):
    """Load whole tensors of a checkpoint, by their names in it. `count` of the answer: tensors that were written.

    dtypes: as torch names them, such as bfloat16. seconds: that this may take.
    """

    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    source: Source
    seconds: float


class VerifyUpdate(Action, frozen=True, kw_only=True):
    """The update has all tensors of the model. partial: it may have some of them only."""

    partial: bool = False


class AbandonUpdate(Action, frozen=True, kw_only=True):
    """The open update has failed somewhere: stay paused, and let go of the trainer's memory."""


class Checksum(Action, frozen=True, kw_only=True):
    """Sum up every tensor; see `toka_async.transfer.checksum`. `sums` of the answer has them."""


class ReadTensor(Action, frozen=True, kw_only=True):
    """Read the first rows of a tensor, by its name in a checkpoint. `rows` of the answer has them."""

    name: str
    num_rows: int


class Sleep(Action, frozen=True, kw_only=True):
    """Give the memory of the cache back. All requests have been aborted or retracted."""


class Wake(Action, frozen=True, kw_only=True):
    """Take the memory of the cache again; it is empty."""


UpdateAction = BeginUpdate | LoadTensors | VerifyUpdate | AbandonUpdate
RankAction = OpenTransfer | CloseTransfer | UpdateAction | Checksum | ReadTensor | Sleep | Wake
AnyAction = Pause | Resume | Abort | ResetPrefixCache | CommitUpdate | SetVersion | RankAction
RANK_ACTIONS = RankAction.__args__


class Control(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True, kw_only=True):
    """Server -> scheduler, scheduler -> rank: an action. number: the server's, from 1."""

    number: int
    action: AnyAction


class PartSum(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The sum of the part of a tensor that a rank has. part: which one; ranks with equal parts have equal sums."""

    name: str
    part: str
    total: int


class PartRows(msgspec.Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """What a rank has of a tensor's first rows. shape: of all these rows. starts, sizes: of the rank's part in them."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    values: memoryview  # float32


class ControlDone(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True, kw_only=True):
    """Rank -> scheduler, scheduler -> server: the end of a Control. error: why it failed; empty: it did not."""

    number: int
    rank: int = 0
    replica: int = 0  # this and `life` as in Ready, filled in by the scheduler
    life: int = 0
    error: str = ""
    count: int = 0
    sums: tuple[PartSum, ...] = ()
    rows: tuple[PartRows, ...] = ()
