"""A rank's process: runs the scheduler's steps in order and sends back what they sampled.

Steps are launched as they arrive; a second thread waits for each to be computed, so that the device always has the next
one before it is done. Knows nothing of requests; what a step computes is the runner's business. Loads torch only for a
device that computes.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from toka_async.checkpoint.generation import read_generation_defaults
from toka_async.checkpoint.spec import ModelError
from toka_async.config import Config
from toka_async.control import Control, ControlDone
from toka_async.gpu_lock import GpuLockError, take_gpu
from toka_async.grammars.matchers import RowMatchers, count_mask_threads
from toka_async.grammars.vocabulary import GrammarVocabulary, is_installed
from toka_async.messages import ExpertLoads, FromRank, RankDevice, Ready, Step, StepDone, ToRank
from toka_async.procs.ahead_of_torch import begin_ahead
from toka_async.procs.child import Alive, ChildSpec, ParentLink, Resources, Started
from toka_async.procs.loading import hold_collections
from toka_async.procs.progress import WorkProgress, answer_while_moving
from toka_async.procs.stage_report import StageReport
from toka_async.startup.progress import StartupProgress
from toka_async.startup.rank_coords import RankCoords
from toka_async.startup.simulated import SimulatedRank, make_simulated_ready
from toka_async.text.tokenizer import Tokenizer, read_for_grammars
from toka_async.transport.base import Outbox
from toka_async.transport.codec import Codec
from toka_async.transport.life_sockets import OTHERS_FIRST, LifeSockets
from toka_async.transport.zmq_sockets import ZmqInbox, ZmqOutbox

if TYPE_CHECKING:  # loads torch
    from toka_async.weights.rank_control import RankControl

LOOPBACK = "lo"
# Multicast over NVLink is not needed, and containers and partitioned machines often lack it.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# A stage's streams wait for other ranks, so none may block another by sharing a queue of the device. Sends and receives
# have groups of their own, so the warning that they wait for each other does not apply.
STAGE_STREAMS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


LOADS_AFTER = 1.0  # seconds without steps after which what the last ones counted of experts is read
Collect = Callable[[], StepDone | ControlDone | ExpertLoads]  # waits for what a device was told to compute


@dataclass(slots=True, frozen=True)
class BuiltRank:
    """A rank that is ready.

    launch: launches a step. launch_loads: launches a reading of experts' loads; None: there are none. enter_thread:
    what a thread that waits for results calls first. control: what a trainer controls.
    """

    ready: Ready
    launch: Callable[[Step], Collect]
    launch_loads: Callable[[], Collect] | None
    enter_thread: Callable[[], None]
    control: RankControl


def run(link: ParentLink) -> None:
    """Run steps until the parent ends this process."""
    spec, places = link.spec, link.spec.places
    sockets = LifeSockets(zmq.Context(), places.keys, spec.config.server.hang_timeout, link.fatal)
    steps: ZmqInbox[ToRank] = sockets.listen(places.ranks[spec.rank], Codec(ToRank), spec.listen_fd)
    results: ZmqOutbox[FromRank] = sockets.connect(places.results, Codec(FromRank))
    sockets.watch()
    try:
        if spec.config.model.device == "simulated":
            serve_simulated(link, steps, results)
        elif spec.warm and misses_gpu(spec):
            warm_without_gpu(link)
        else:
            serve(link, steps, results)
    except (ModelError, GpuLockError) as error:
        link.fatal(str(error), user=True)


def lock_gpu(spec: ChildSpec, gpus: Sequence[str]) -> None:
    """Lock the rank's GPU until the end of this process, unless GPUs may be shared.

    gpus: names of those that this machine's ranks of all replicas use. When these start together, they lock them in the
    order of the names, as other engines do. Raises GpuLockError.
    """
    own = gpus[make_coords(spec).device_index]
    all_start = not spec.life and not spec.warm
    before = max((gpu for gpu in gpus if gpu < own), default=None) if all_start else None
    if folder := spec.config.parallel.gpu_locks:
        take_gpu(own, folder, before)


def serve_simulated(link: ParentLink, steps: ZmqInbox[ToRank], results: ZmqOutbox[FromRank]) -> NoReturn:
    """Serve with a rank that computes nothing and keeps its own time. Raises GpuLockError."""
    config, shape = link.spec.config, link.spec.shape
    ready = msgspec.structs.replace(
        make_simulated_ready(shape, config.model, config.cache, config.schedule),
        token_seconds=config.simulated.token_us / 1e6,
        ranks=(RankDevice(rank=link.spec.rank, device="simulated", dtype=""),),
    )
    vocabulary = make_vocabulary(link.spec)
    matchers = None if vocabulary is None else RowMatchers(vocabulary, ready.max_seqs, count_mask_threads(1))
    rank = SimulatedRank(ready, config.simulated, matchers=matchers)
    if config.simulated.gpu:
        count = make_coords(link.spec).num_sharing
        lock_gpu(link.spec, [f"{config.simulated.gpu}-{name_gpu(index, os.environ)}" for index in range(count)])
    announce(link, results, ready)
    answers = link.spec.rank == link.spec.topology.layout.answering
    while True:
        queued = steps.drain()
        if not queued:
            rank.wait()
            queued = [steps.receive()]
        for step in queued:
            if isinstance(step, Control):
                results.send(rank.control(step, link.spec.rank))
                continue
            for part in step.passes():
                done = rank.run(part)
                if answers:
                    results.send(done)


def name_gpu(index: int, environ: Mapping[str, str]) -> str:
    """Name a GPU as CUDA would: by its place in CUDA_VISIBLE_DEVICES, or its index without one there."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index] if index < len(visible) and visible[index] else str(index)


def misses_gpu(spec: ChildSpec) -> bool:
    """Tells whether the configuration admits a GPU, and there is none."""
    if spec.config.model.device == "cpu":
        return False
    set_environment(make_coords(spec))
    with make_progress(spec).stage("libraries", "loading torch"):
        import torch

    return not torch.cuda.is_available()


def warm_without_gpu(link: ParentLink) -> NoReturn:
    """Do for a later start what needs no GPU, and wait for the end. Raises ModelError."""
    from toka_async.startup.without_gpu import compile_without_gpu

    if link.spec.rank == 0:
        compile_without_gpu(link.spec.shape, link.spec.config, make_progress(link.spec))
    link.report(Started())
    while True:
        signal.pause()


def serve(link: ParentLink, steps: ZmqInbox[ToRank], results: ZmqOutbox[FromRank]) -> NoReturn:
    """Serve with a model. Raises ModelError or GpuLockError before the rank is ready."""
    try:
        rank = build(link.spec)
    except (ModelError, GpuLockError):
        raise
    except Exception as error:
        let_others_end(link)
        refuse_lost_memory(error, link.spec.config)
        raise
    announce(link, results, rank.ready)
    launched: SimpleQueue[Collect] = SimpleQueue()
    progress, send = WorkProgress(), make_sender(link, results)

    def end_step(step: StepDone | ControlDone | ExpertLoads) -> None:
        if isinstance(step, StepDone):
            progress.end()
        send(step)

    watch_steps(link, progress, rank.control.count_mapped_bytes)
    sender = threading.Thread(
        target=send_results, args=(link, launched, end_step, rank.enter_thread), name="results", daemon=True
    )
    sender.start()
    has_counted = False
    try:
        while True:
            if has_counted and rank.launch_loads is not None and not steps.wait(LOADS_AFTER):
                has_counted = False
                launched.put(rank.launch_loads())
            message = steps.receive()
            if isinstance(message, Control):
                # The other thread sends all answers. An action may take as long as it says.
                launched.put(rank.control.launch(message))
                has_counted = False  # it may have given memory back
                continue
            for part in message.passes():
                progress.begin()
                launched.put(rank.launch(part))
                has_counted = True
    except RuntimeError as error:
        report_device_failure(link, error)


def watch_steps(link: ParentLink, progress: WorkProgress, count_mapped: Callable[[], int]) -> None:
    """End the process when a GPU hangs. On a CPU a step may take any time.

    count_mapped: counts bytes of the GPU that torch's allocator does not.
    """
    if link.spec.config.model.device == "cpu":
        return
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory

    def make_alive() -> Alive:
        # Our and the allocator's own counts: asking the driver could wait for a device that hangs.
        mapped = count_mapped()
        return Alive((torch.cuda.memory_allocated(device) + mapped, torch.cuda.memory_reserved(device) + mapped, total))

    answer_while_moving(link, progress, link.spec.config.server.step_timeout, "a step", make_alive)


def make_sender(link: ParentLink, results: Outbox[FromRank]) -> Callable[[StepDone | ControlDone | ExpertLoads], None]:
    """Make the function that sends a step's results (from one rank), times and loads (from one of each stage)."""
    layout, rank = link.spec.topology.layout, link.spec.rank
    stage, tensor_rank = layout.find_stage(rank)
    report = StageReport(stage, results) if layout.pp > 1 and tensor_rank == 0 else None

    def send(step: StepDone | ControlDone | ExpertLoads) -> None:
        if isinstance(step, ControlDone):  # every rank answers
            results.send(step)
            return
        if isinstance(step, ExpertLoads):
            if tensor_rank == 0:  # all ranks of a stage route alike
                results.send(step)
            return
        if step.loads is not None:
            send(step.loads)
            step = msgspec.structs.replace(step, loads=None)
        if rank == layout.answering:  # all ranks of the last stage sample the same tokens
            results.send(step)
        if report is not None:
            report.add(step)

    return send


def send_results(
    link: ParentLink,
    launched: SimpleQueue[Collect],
    send: Callable[[StepDone | ControlDone | ExpertLoads], None],
    enter_thread: Callable[[], None],
) -> None:
    """Send every step's results, in order, as they are computed. Any error ends the process: no step may be missing."""
    try:
        enter_thread()
        while True:
            send(launched.get()())
    except RuntimeError as error:
        report_device_failure(link, error)
    except Exception as error:  # otherwise only this thread would end, and the scheduler wait for ever
        logging.getLogger(__name__).exception("stopped by an error")
        link.fatal(f"{type(error).__name__}: {error}")


def report_device_failure(link: ParentLink, error: RuntimeError) -> NoReturn:
    """End the process: the device is out of memory or broken, and what is queued on it is lost."""
    logging.getLogger(__name__).exception("the device failed")
    let_others_end(link)
    link.fatal(f"the device failed: {error}")


def refuse_lost_memory(error: Exception, config: Config) -> None:
    """Raise ModelError if a start ran out of the GPU's memory: for what was not measured, or others took it."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"cache.memory_fraction={config.cache.memory_fraction}: the GPU's memory did not suffice for the start; "
            f"end what else uses it, or use less of it ({reason})"
        ) from error


def let_others_end(link: ParentLink) -> None:
    """Wait: a rank may fail because another one died, and the parent stops this one when it hears of that."""
    if link.spec.topology.layout.num_ranks > 1:
        time.sleep(OTHERS_FIRST)


def announce(link: ParentLink, results: Outbox[FromRank], ready: Ready) -> None:
    """Tell that the rank is ready. What lives now lives to the end, so the garbage collector skips it."""
    gc.collect()  # with torch loaded it takes some tenths of a second, for which no request should wait
    gc.freeze()
    results.send(ready)
    link.report(Started(make_resources(ready)))


def make_resources(ready: Ready) -> Resources:
    (own,) = ready.ranks
    return Resources(
        device=own.device,
        dtype=own.dtype,
        num_tokens=ready.num_pages * ready.page_size,
        max_context=ready.max_context,
        max_seqs=ready.max_seqs,
        max_tokens=ready.max_tokens,
    )


def build(spec: ChildSpec) -> BuiltRank:
    """Raise ModelError or GpuLockError if the rank cannot be built."""
    config, model_dir = spec.config, Path(spec.model_dir)
    place = make_coords(spec)
    set_environment(place)
    stages = make_progress(spec)
    with stages.stage("libraries", "loading torch"), hold_collections():
        if config.model.device != "cpu":
            begin_ahead()
        vocabulary = make_vocabulary(spec) if place.is_last else None
        if vocabulary is not None:
            vocabulary.wait()  # making it holds Python's lock, and torch's libraries are loaded meanwhile without it
        from toka_async.startup.runner_factory import RunnerFactory

    factory = RunnerFactory(
        model_dir,
        spec.shape,
        config,
        place,
        stages,
        compiles_first=spec.warm,
        lock_gpu=partial(lock_gpu, spec),
        vocabulary=vocabulary,
    )
    runner = factory.build()
    if spec.warm and spec.rank == 0:
        logging.getLogger(__name__).info("ready for later starts: %s", factory.describe_kept())
    number = spec.replica * spec.topology.layout.num_ranks + spec.rank
    control = factory.make_control(runner, spec.rank, number)
    return BuiltRank(
        runner.ready,
        lambda step: runner.launch(step).collect,
        (lambda: runner.launch_loads().collect) if runner.counts_loads else None,
        runner.enter_thread,
        control,
    )


def make_vocabulary(spec: ChildSpec) -> GrammarVocabulary | None:
    """Makes the tokens for grammars; None where requests with one are refused. Raises ModelError or TokenizerError."""
    if not is_installed():
        return None
    use_file = spec.config.model.generation_config == "auto"
    folder = Path(spec.tokenizer_dir)
    end_ids = read_generation_defaults(Path(spec.model_dir), spec.shape, use_file).eos_token_ids
    if not end_ids and (own := Tokenizer.load(folder).eos_token_id) is not None:
        end_ids = (own,)
    return GrammarVocabulary(partial(read_for_grammars, folder), spec.shape.vocab_size, end_ids)


def make_progress(spec: ChildSpec) -> StartupProgress:
    """Makes what shows the start: the first rank draws, and the first ones of other replicas log."""
    return StartupProgress(shown=spec.rank == spec.replica == spec.life == 0, logged=spec.rank == 0)


def set_environment(place: RankCoords) -> None:
    """Sets what torch, its allocator and NCCL read when they are loaded."""
    # Threads that spin for work starve the other processes (measured: 5 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Steps differ in size: blocks that cannot grow would fragment memory more and more.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.update(NO_MULTICAST)
    # With captured graphs NCCL would register memory, which fails where the allocator's blocks grow.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if place.num_stages > 1:
        os.environ.update(STAGE_STREAMS)
    if place.num_nodes > 1:
        os.environ.update({"GLOO_SOCKET_IFNAME": place.interface})
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={place.interface}")  # "=": the name, not a prefix of names
    elif place.world_size > 1 and LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # all ranks are on this machine


def make_coords(spec: ChildSpec) -> RankCoords:
    layout, parallel = spec.topology.layout, spec.config.parallel
    stage, rank = layout.find_stage(spec.rank)
    return RankCoords(
        rank=rank,
        size=layout.tp,
        stage=stage,
        num_stages=layout.pp,
        device_index=layout.choose_gpu(spec.replica, spec.rank),
        group=spec.places.group,
        group_fd=spec.group_fd,
        num_nodes=layout.nodes,
        interface=spec.interface,
        num_sharing=layout.dp * layout.ranks_per_node,
        num_micro_batches=parallel.num_micro_batches,
    )
