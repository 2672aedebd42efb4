from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from toka_async.arrays import as_bool, as_i32, as_i64, column, f32_column, i32_column
from toka_async.control import (
    AbandonUpdate,
    Abort,
    BeginUpdate,
    Broadcast,
    Checksum,
    CloseTransfer,
    CommitUpdate,
    Control,
    ControlDone,
    CudaBucket,
    CudaHandle,
    Directory,
    GroupTransfer,
    LoadTensors,
    NcclTransfer,
    OpenTransfer,
    PartRows,
    PartSum,
    Pause,
    RankAction,
    ReadTensor,
    ResetPrefixCache,
    Resume,
    SetVersion,
    ShmBucket,
    Sleep,
    Source,
    VerifyUpdate,
    Wake,
)
from toka_async.messages import (
    AskStats,
    Cancels,
    ChunkLogprobs,
    DropStop,
    EndSample,
    ExpertLoads,
    Failed,
    Forecast,
    FromRank,
    Prefilled,
    Prefills,
    Prompt,
    RankDevice,
    Ready,
    Reason,
    StageTimes,
    Stats,
    Step,
    StepDone,
    StopChecks,
    StopMask,
    Submits,
    Tokens,
    TokenSampling,
    ToRank,
    ToScheduler,
    ToServer,
)
from toka_async.transport.codec import Codec

IDS = i32_column([1, 2, 3])
FLOATS = f32_column([-0.5, 0.25, 1.5])
FLAGS = column(np.asarray([True, False, True]))
SAMPLING = TokenSampling(
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=-0.3,
    repetition_penalty=1.2,
    min_tokens=3,
    end_ids=IDS,
    bias_ids=IDS,
    bias_values=FLOATS,
    num_logprobs=2,
    num_prompt_logprobs=0,
)
READY = Ready(num_pages=10, page_size=16, max_seqs=4, max_context=100, vocab_size=50)
PROMPT = Prompt(key=3, token_ids=IDS, num_prompt=2, pages=IDS, sampling=SAMPLING)
STEP = Step(
    step_id=2**40,
    dropped_prompts=IDS,
    freed=IDS,
    prompts=(PROMPT, PROMPT),
    admit_slots=IDS,
    admit_keys=IDS,
    admit_starts=IDS,
    admit_seeds=column(np.asarray([1, -(2**63), 2**63 - 1])),
    copy_sources=IDS,
    copy_targets=IDS,
    page_slots=IDS,
    page_ids=IDS,
    joined=IDS,
    order=IDS,
    group_starts=IDS,
    group_rows=IDS,
    group_pages=IDS,
    chunk_slots=IDS,
    chunk_lengths=IDS,
    chunk_samples=FLAGS,
)
CHUNK = ChunkLogprobs(slot=1, start=4, logprobs=FLOATS, ranks=IDS, num_top=1, top_ids=IDS, top_logprobs=FLOATS)
TO_SCHEDULER: list[ToScheduler] = [
    Control(number=7, action=Pause(mode="keep")),
    Control(number=8, action=Abort(request_ids=IDS)),
    Control(number=9, action=Resume()),
    Control(number=10, action=ResetPrefixCache()),
    Control(number=11, action=CommitUpdate(version="v")),
    Control(number=12, action=AbandonUpdate()),
    Control(number=13, action=SetVersion(version="v")),
    Submits(
        request_ids=IDS,
        lengths=IDS,
        prompts=IDS,
        seeds=IDS,
        max_tokens=IDS,
        sampling=SAMPLING,
        stream=True,
        stop_id=2,
        priority=-1,
    ),
    Cancels(request_ids=IDS),
    StopMask(stop_id=1, mask=FLAGS, window=9),
    DropStop(stop_id=1),
    EndSample(request_id=1, sample=2, num_tokens=3),
    AskStats(number=2, forecast=True),
]
TO_SERVER: list[ToServer] = [
    ControlDone(number=7, replica=1, life=2, error="no", count=3),
    READY,
    msgspec.structs.replace(READY, ranks=(RankDevice(rank=1, device="cpu", dtype="float32", total=2**40),)),
    Tokens(
        request_ids=IDS,
        samples=IDS,
        counts=IDS,
        reasons=i32_column([Reason.NONE, Reason.STOP, Reason.LENGTH]),
        token_ids=IDS,
        num_logprobs=1,
        logprobs=FLOATS,
        top_ids=IDS,
        top_logprobs=FLOATS,
    ),
    Prefilled(request_id=1, cached_tokens=16, logprobs=FLOATS, top_ids=IDS, top_logprobs=FLOATS),
    Prefills(request_ids=IDS, cached_tokens=IDS),
    StopChecks(request_ids=IDS, samples=IDS, num_tokens=IDS, counts=IDS, token_ids=IDS),
    Failed(request_id=1, message="zu groß"),
    Stats(num_running=1, num_pages=2**40, step_seconds=0.5),
    Stats(expert_loads=(memoryview(b""), IDS)),
    Stats(forecast=Forecast(steps=40, pages=(7, 5, 0), limit=2**30)),
]
SHARED = CudaHandle(gpu="1", handle=b"2", size=3, offset=4, counter=b"5", counter_offset=6, event=b"7", waits=True)
GROUP = GroupTransfer(address="here", port=1, rank_offset=1, world_size=2, backend="gloo")
BUCKETS: list[Source] = [
    Broadcast(transfer="t"),
    ShmBucket(name="s", offsets=(0, 16)),
    CudaBucket(handles=(SHARED,), offsets=(0, 16)),
    Directory(path="/p"),
]
NAMES: dict[str, Any] = {"names": ("a", "b"), "dtypes": ("float32", "bfloat16"), "shapes": ((2, 3), ())}
RANK_CONTROL: list[RankAction] = [
    OpenTransfer(transfer=GROUP, seconds=1.5),
    OpenTransfer(transfer=NcclTransfer(unique_id=bytes(128), rank_offset=1, world_size=2), seconds=1.5),
    CloseTransfer(name="t"),
    BeginUpdate(),
    *(LoadTensors(**NAMES, source=source, seconds=2.5) for source in BUCKETS),
    VerifyUpdate(partial=True),
    Checksum(),
    ReadTensor(name="a", num_rows=3),
    Sleep(),
    Wake(),
]
FROM_RANK: list[FromRank] = [
    ControlDone(number=7, rank=1, sums=(PartSum("a", "0+1", 2**64 - 1),)),
    ControlDone(number=7, rows=(PartRows(shape=(9, 3), starts=(8, 0), sizes=(1, 3), values=FLOATS),)),
    READY,
    StageTimes(stage=1, seconds=2.5, stalled=0.25, waited=1.5),
    StepDone(
        step_id=7,
        token_ids=IDS,
        logprobs=FLOATS,
        top_rows=IDS,
        top_counts=IDS,
        top_ids=IDS,
        top_logprobs=FLOATS,
        prompts=(CHUNK, CHUNK),
        seconds=0.04,
    ),
    StageTimes(1, 2.5, 0.5, 0.25),
    ExpertLoads((0, 2), (IDS, IDS)),
]
CHANNELS = [
    *((ToScheduler, message) for message in TO_SCHEDULER),
    *((ToServer, message) for message in TO_SERVER),
    *((FromRank, message) for message in FROM_RANK),
    (ToRank, STEP),
    *((ToRank, Control(number=1, action=action)) for action in RANK_CONTROL),
]


@pytest.mark.parametrize(("union", "message"), CHANNELS, ids=lambda value: type(value).__name__)
def test_every_message_comes_back_equal(union: object, message: object) -> None:
    codec: Codec[object] = Codec(union)
    back = codec.decode(codec.encode(message))
    assert type(back) is type(message)
    assert back == message


def test_every_message_of_every_channel_is_tested() -> None:
    for union, messages in ((ToScheduler, TO_SCHEDULER), (ToServer, TO_SERVER), (FromRank, FROM_RANK)):
        assert {type(message) for message in messages} == set(union.__args__)


def test_columns_of_a_decoded_message_are_views_of_the_received_bytes() -> None:
    codec: Codec[ToRank] = Codec(ToRank)
    data = bytearray(codec.encode(STEP))
    back = codec.decode(memoryview(data))
    assert isinstance(back, Step)
    place = bytes(data).index(IDS.tobytes())
    data[place] = 99  # of the first column, dropped_prompts
    assert as_i32(back.dropped_prompts).tolist() == [99, 2, 3]
    assert np.shares_memory(as_i32(back.freed), np.frombuffer(data, np.uint8))
    assert as_i64(back.admit_seeds).tolist() == [1, -(2**63), 2**63 - 1]
    assert as_bool(back.chunk_samples).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["Step", 1]),
        msgspec.msgpack.encode(["DropStop", "one"]),
        msgspec.msgpack.encode({"request_id": 1}),
    ],
)
def test_what_is_no_message_of_the_channel_is_an_error(data: bytes) -> None:
    codec: Codec[ToScheduler] = Codec(ToScheduler)
    with pytest.raises(msgspec.DecodeError):
        codec.decode(data)
