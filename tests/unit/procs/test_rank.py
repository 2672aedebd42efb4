from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import NoReturn, cast

import msgspec
import pytest
import torch

from toka_async.arrays import EMPTY, i32_column
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.config import Config, ParallelConfig
from toka_async.control import Checksum, Control, ControlDone
from toka_async.messages import ExpertLoads, FromRank, RankDevice, Ready, StageTimes, Step, StepDone, ToRank
from toka_async.procs import rank
from toka_async.procs.child import Alive, ChildSpec, Fatal, ParentLink, Started, Status
from toka_async.procs.progress import WorkProgress
from toka_async.procs.rank import (
    LOADS_AFTER,
    BuiltRank,
    Collect,
    announce,
    make_resources,
    make_sender,
    send_results,
    serve,
)
from toka_async.topology import Layout, local_topology, make_layout
from toka_async.transport.life_sockets import OTHERS_FIRST
from toka_async.transport.zmq_sockets import ZmqInbox, ZmqOutbox
from toka_async.weights.rank_control import RankControl

READY = Ready(
    num_pages=1,
    page_size=1,
    max_seqs=1,
    max_context=1,
    vocab_size=1,
    ranks=(RankDevice(rank=0, device="cpu", dtype="float32"),),
)


def make_spec(config: Config) -> ChildSpec:
    return ChildSpec(
        role="rank",
        config=config,
        topology=local_topology(Path("unused"), make_layout(config)),
        model_dir="",
        tokenizer_dir="",
        served_name="",
        shape=read_spec(resolve_model("demo")),
    )


PAUSE = "pause"


class Link(ParentLink):
    """A child's link without a parent: keeps what would be said, and ends a thread in place of the process."""

    def __init__(self) -> None:
        self.on_beat = lambda: self.report(Alive())
        self.spec = make_spec(Config())
        self.statuses: list[Status] = []
        self.code: int | None = None

    def report(self, status: Status) -> None:
        self.statuses.append(status)

    def exit(self, code: int = 0) -> NoReturn:
        self.code = code
        raise SystemExit(code)


class Results:
    """An outbox that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[FromRank] = []
        self.has_sent = threading.Condition()

    def send(self, message: FromRank) -> None:
        with self.has_sent:
            self.sent.append(message)
            self.has_sent.notify()

    def wait_for(self, count: int) -> None:
        with self.has_sent:
            assert self.has_sent.wait_for(lambda: len(self.sent) >= count, timeout=5)

    def close(self) -> None:
        raise AssertionError("closed while in use")

    @property
    def step_ids(self) -> list[int]:
        return [message.step_id for message in self.sent if isinstance(message, StepDone)]


class Computed:
    """A launched step: its id is all it samples, or an error."""

    def __init__(self, step_id: int, error: Exception | None = None) -> None:
        self.step_id = step_id
        self.error = error

    def collect(self) -> StepDone:
        if self.error is not None:
            raise self.error
        return StepDone(step_id=self.step_id, token_ids=i32_column([self.step_id]))


class Steps:
    """An inbox; when it is empty, the parent ends the process. PAUSE: nothing comes for long."""

    def __init__(self, steps: Sequence[ToRank | str], link: Link, results: Results, num_results: int) -> None:
        self.steps = [*steps]
        self.link = link
        self.results = results
        self.num_results = num_results

    def wait(self, seconds: float) -> bool:
        assert seconds == LOADS_AFTER
        return self.steps[:1] != [PAUSE]

    def receive(self) -> ToRank:
        while self.steps[:1] == [PAUSE]:
            self.steps.pop(0)
        if not self.steps:
            self.results.wait_for(self.num_results)
            self.link.exit()
        return cast("ToRank", self.steps.pop(0))


def nothing() -> None:
    """What a thread does first where there is no GPU."""


def ignore(_: object) -> None:
    """What a rank does whose results are another's too."""


def queue_of(*launched: Computed) -> SimpleQueue[Collect]:
    queue: SimpleQueue[Collect] = SimpleQueue()
    for step in launched:
        queue.put(step.collect)
    return queue


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def results() -> Results:
    return Results()


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with garbage, in place of doing it."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    return calls


@pytest.mark.parametrize(("number", "sent"), [(0, []), (1, []), (2, [6, 7]), (3, [])])
def test_the_last_stages_first_rank_answers(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch, number: int, sent: list[int]
) -> None:
    """The first of each stage tells of its times."""
    topology = local_topology(Path("unused"), Layout(pp=2, tp=2))
    link.spec = msgspec.structs.replace(link.spec, topology=topology, rank=number)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(SystemExit):
        send_results(
            link,
            queue_of(Computed(6), Computed(7), Computed(8, RuntimeError("broken"))),
            make_sender(link, results),
            nothing,
        )
    assert link.statuses == [Fatal("the device failed: broken")]
    assert results.step_ids == sent
    times = [message.stage for message in results.sent if isinstance(message, StageTimes)]
    assert times == ([] if number % 2 else [number // 2])


@pytest.mark.parametrize("number", range(4))
def test_the_first_rank_of_each_stage_tells_its_experts_loads(link: Link, results: Results, number: int) -> None:
    topology, loads = local_topology(Path("unused"), Layout(pp=2, tp=2)), ExpertLoads((number // 2,), (EMPTY,))
    link.spec = msgspec.structs.replace(link.spec, topology=topology, rank=number)
    send = make_sender(link, results)
    send(StepDone(step_id=6, token_ids=EMPTY, loads=loads))
    send(loads)
    assert [message for message in results.sent if isinstance(message, ExpertLoads)] == 2 * [loads] * (number % 2 == 0)
    assert all(message.loads is None for message in results.sent if isinstance(message, StepDone))


@pytest.mark.parametrize(
    ("layout", "waits"), [(Layout(dp=2), []), (Layout(tp=2), [OTHERS_FIRST]), (Layout(pp=2), [OTHERS_FIRST])]
)
def test_a_rank_among_others_lets_a_dead_one_be_heard_of_first(
    link: Link, monkeypatch: pytest.MonkeyPatch, layout: Layout, waits: list[float]
) -> None:
    topology = local_topology(Path("unused"), layout)
    link.spec = msgspec.structs.replace(link.spec, topology=topology)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(SystemExit):
        send_results(link, queue_of(Computed(7, RuntimeError("Connection closed by peer"))), ignore, nothing)
    assert waited == waits


def test_results_are_sent_in_order_until_one_fails(
    link: Link, results: Results, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Computed(8, RuntimeError("CUDA error: an illegal access\nCompile with `TORCH_USE_CUDA_DSA`"))
    queue = queue_of(Computed(6), Computed(7), failing, Computed(9))
    with pytest.raises(SystemExit):
        send_results(link, queue, results.send, nothing)
    assert results.step_ids == [6, 7]
    message = "the device failed: CUDA error: an illegal access Compile with `TORCH_USE_CUDA_DSA`"
    assert link.statuses == [Fatal(message, user=False)]
    assert link.code == 1
    assert [record.exc_info is not None for record in caplog.records] == [True]  # with its trace, in the log


@pytest.mark.parametrize("error", [AssertionError("two\nlines"), ValueError("two\nlines")])
def test_no_error_ends_the_thread_alone(
    link: Link, results: Results, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        send_results(link, queue_of(Computed(1, error)), results.send, nothing)
    assert link.statuses == [Fatal(f"{type(error).__name__}: two lines", user=False)]
    assert link.code == 1
    assert caplog.records[0].levelno == logging.ERROR


def test_announcing(link: Link, results: Results, frozen: list[str]) -> None:
    announce(link, results, READY)
    assert results.sent == [READY]
    assert link.statuses == [Started(make_resources(READY))]
    assert frozen == ["collect", "freeze"]


def run_serve(
    patch: pytest.MonkeyPatch,
    launch: Callable[[Step], Computed],
    link: Link,
    results: Results,
    steps: Steps,
    launch_loads: Callable[[], Collect] | None = None,
) -> list[Status]:
    """Serves until the process ends; what it said. Its thread then ends too."""
    entered: list[str] = []
    queue: SimpleQueue[Collect] = SimpleQueue()
    patch.setattr(rank, "SimpleQueue", lambda: queue)
    control = SimpleNamespace(launch=lambda order: lambda: ControlDone(number=order.number), count_mapped_bytes=None)
    started = BuiltRank(
        READY,
        lambda step: launch(step).collect,
        launch_loads,
        lambda: entered.append(threading.current_thread().name),
        cast("RankControl", control),
    )
    patch.setattr(rank, "build", lambda _: started)
    patch.setattr(threading, "excepthook", lambda _: None)
    before = set(threading.enumerate())
    with pytest.raises(SystemExit):
        serve(link, cast("ZmqInbox[ToRank]", steps), cast("ZmqOutbox[FromRank]", results))
    statuses = [*link.statuses]
    queue.put(Computed(0, RuntimeError("the process has ended")).collect)
    for thread in set(threading.enumerate()) - before:
        assert (thread.name, thread.daemon) == ("results", True)
        thread.join(5)
    assert set(threading.enumerate()) <= before
    assert entered == ["results"]
    return statuses


@pytest.mark.usefixtures("frozen")
def test_every_pass_of_a_step_is_launched_and_sent(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def launch(step: Step) -> Computed:
        launched.append(step.step_id)
        return Computed(step.step_id)

    steps = [Step(step_id=3), Step(step_id=4, num_passes=4), Step(step_id=8)]
    statuses = run_serve(monkeypatch, launch, link, results, Steps(steps, link, results, 1 + 6))
    assert launched == [3, 4, 5, 6, 7, 8]
    assert results.sent[0] == READY
    assert results.step_ids == [3, 4, 5, 6, 7, 8]
    assert statuses == [Started(make_resources(READY))]


@pytest.mark.usefixtures("frozen")
def test_steps_are_launched_while_others_are_computed(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes long holds up its results, and those of the steps after it, but no launch."""
    all_launched = threading.Event()

    class Slow(Computed):
        def collect(self) -> StepDone:
            assert all_launched.wait(60)
            return super().collect()

    def launch(step: Step) -> Computed:
        if step.step_id == 3:
            all_launched.set()
        return Slow(step.step_id)

    steps = [Step(step_id=i) for i in (1, 2, 3)]
    run_serve(monkeypatch, launch, link, results, Steps(steps, link, results, 1 + 3))
    assert results.step_ids == [1, 2, 3]


@pytest.mark.usefixtures("frozen")
def test_an_action_is_answered_after_the_steps_before_it(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[ToRank] = [Step(step_id=1), Control(number=5, action=Checksum()), Step(step_id=2)]
    run_serve(monkeypatch, lambda step: Computed(step.step_id), link, results, Steps(messages, link, results, 1 + 3))
    sent = [each.step_id if isinstance(each, StepDone) else each for each in results.sent[1:]]
    assert sent == [1, ControlDone(number=5), 2]


@pytest.mark.usefixtures("frozen")
def test_what_the_last_steps_counted_is_read_once_none_comes(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before a step, and not after an action, which may have given the counts' memory back."""
    order, loads = Control(number=5, action=Checksum()), ExpertLoads((0,), (EMPTY,))
    messages: list[ToRank | str] = [
        PAUSE,
        Step(step_id=1),
        Step(step_id=2),
        PAUSE,
        Step(step_id=3),
        order,
        PAUSE,
        Step(step_id=4),
    ]
    steps = Steps(messages, link, results, 1 + 6)
    run_serve(monkeypatch, lambda step: Computed(step.step_id), link, results, steps, lambda: lambda: loads)
    sent = [each.step_id if isinstance(each, StepDone) else each for each in results.sent[1:]]
    assert sent == [1, 2, loads, 3, ControlDone(number=5), 4]


@pytest.mark.usefixtures("frozen")
def test_a_failing_launch_ends_the_process(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(_: Step) -> Computed:
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    statuses = run_serve(monkeypatch, launch, link, results, Steps([Step(step_id=2)], link, results, 0))
    failure = Fatal("the device failed: CUDA out of memory. Tried to allocate", user=False)
    assert statuses == [Started(make_resources(READY)), failure]
    assert caplog.records


def test_a_model_that_does_not_fit_is_never_ready(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_: ChildSpec) -> NoReturn:
        raise ModelError("cache.num_tokens=9: too many")

    monkeypatch.setattr(rank, "build", build)
    with pytest.raises(ModelError, match="too many"):
        serve(link, cast("ZmqInbox[ToRank]", None), cast("ZmqOutbox[FromRank]", results))
    assert not results.sent
    assert not link.statuses


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried"),
            ModelError,
            r"cache\.memory_fraction=0\.9: .* of memory",
        ),
        (KeyError("a bug"), KeyError, "a bug"),
    ],
)
def test_a_start_that_fails_lets_a_dead_rank_be_heard_of_first(
    link: Link, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], message: str
) -> None:
    def build(_: ChildSpec) -> NoReturn:
        raise error

    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(rank, "build", build)
    link.spec = msgspec.structs.replace(link.spec, topology=local_topology(Path("unused"), Layout(tp=2)))
    with pytest.raises(raised, match=message):
        serve(link, cast("ZmqInbox[ToRank]", None), cast("ZmqOutbox[FromRank]", None))
    assert waited == [OTHERS_FIRST]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_rank_tells_of_its_gpu_and_of_a_step_that_hangs(
    link: Link, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    """On a CPU a step takes as long as it takes."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=3))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2)
    now = 0.0
    progress = WorkProgress(lambda: now)
    rank.watch_steps(link, progress, lambda: 40)
    progress.begin()
    link.on_beat()
    assert link.statuses == [Alive((41, 42, 3) if has_gpu else None)]
    now = 301.0
    if has_gpu:
        with pytest.raises(SystemExit):
            link.on_beat()
        assert link.statuses[1:] == [Fatal("a step did not end in 300 s")]
    else:
        link.on_beat()
        assert link.statuses[1:] == [Alive()]


@pytest.mark.parametrize("shared", [False, True])
def test_a_gpu_is_locked_unless_engines_share_it(tmp_path: Path, shared: bool) -> None:
    rank.lock_gpu(make_spec(Config(parallel=ParallelConfig(gpu_locks="" if shared else str(tmp_path)))), ["GPU-1"])
    assert [path.name for path in tmp_path.iterdir()] == ([] if shared else ["toka-async-GPU-1.lock"])


@pytest.mark.parametrize(
    ("replica", "life", "warm", "after"),
    [(0, 0, False, "GPU-1"), (1, 0, False, "GPU-2"), (2, 0, False, None), (1, 1, False, None), (1, 0, True, None)],
)
def test_gpus_are_locked_in_the_order_of_their_names_by_ranks_that_start_together(
    monkeypatch: pytest.MonkeyPatch, replica: int, life: int, warm: bool, after: str | None
) -> None:
    """A replica that starts again waits for no other one, and a warm-up has only one."""
    taken: list[tuple[str, str, str | None]] = []
    monkeypatch.setattr(rank, "take_gpu", lambda *wanted: taken.append(wanted))
    config = Config(parallel=ParallelConfig(dp=3, gpu_locks="/locks"))
    spec = msgspec.structs.replace(make_spec(config), replica=replica, life=life, warm=warm)
    gpus = ["GPU-2", "GPU-3", "GPU-1"]
    rank.lock_gpu(spec, gpus)
    assert taken == [(gpus[replica], "/locks", after)]


@pytest.mark.parametrize(
    ("visible", "index", "name"),
    [(None, 1, "1"), ("", 1, "1"), ("3,5", 1, "5"), ("GPU-8f", 0, "GPU-8f"), ("3", 1, "1")],
)
def test_a_gpu_is_named_by_its_place_among_the_visible_ones(visible: str | None, index: int, name: str) -> None:
    assert rank.name_gpu(index, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == name
