"""A rank's process: runs the scheduler's steps in order and sends back what they sampled.

Steps are launched as they arrive; a thread of its own waits for each to be computed, so that the device always has the
next one before it is done. Knows nothing of requests; what a step computes is the runner's business. Loads torch only
for a device that computes.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn, Protocol

import zmq

from toka_async.messages import FromRank, Ready, Step, StepDone, ToRank
from toka_async.model.spec import ModelError, read_spec
from toka_async.procs.child import ChildSpec, ParentLink, Started
from toka_async.runner.simulated import SimulatedRank, simulated_ready
from toka_async.transport.base import Outbox
from toka_async.transport.codec import Codec
from toka_async.transport.zmq_sockets import ZmqInbox, ZmqOutbox


class Launched(Protocol):
    """A step that a device was told to compute."""

    def collect(self) -> StepDone:
        """Waits for it."""
        ...


def run(link: ParentLink) -> None:
    """Run steps until the parent ends this process."""
    spec, topology = link.spec, link.spec.topology
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    steps: ZmqInbox[ToRank] = ZmqInbox(context, topology.ranks[spec.replica][spec.rank], Codec(ToRank))
    results: ZmqOutbox[FromRank] = ZmqOutbox(context, topology.scheduler_ranks[spec.replica], Codec(FromRank))
    try:
        if spec.config.model.device == "simulated":
            serve_simulated(link, steps, results)
        else:
            serve(link, steps, results)
    except ModelError as error:
        link.fatal(str(error), user=True)


def serve_simulated(link: ParentLink, steps: ZmqInbox[ToRank], results: ZmqOutbox[FromRank]) -> NoReturn:
    """With a rank that computes nothing and keeps its own time."""
    config = link.spec.config
    shape = read_spec(Path(link.spec.model_dir))
    ready = simulated_ready(shape, config.model, config.cache, config.schedule)
    rank = SimulatedRank(ready, config.simulated)
    announce(link, results, ready)
    while True:
        queued = steps.drain()
        if not queued:
            rank.wait()
            queued = [steps.receive()]
        for step in queued:
            for part in step.passes():
                results.send(rank.run(part))


def serve(link: ParentLink, steps: ZmqInbox[ToRank], results: ZmqOutbox[FromRank]) -> NoReturn:
    """With a model. Raises ModelError before it is ready."""
    ready, launch = build(link.spec)
    announce(link, results, ready)
    launched: SimpleQueue[Launched] = SimpleQueue()
    sender = threading.Thread(target=send_results, args=(link, launched, results), name="results", daemon=True)
    sender.start()
    try:
        while True:
            for part in steps.receive().passes():
                launched.put(launch(part))
    except RuntimeError as error:
        device_failed(link, error)


def send_results(link: ParentLink, launched: SimpleQueue[Launched], results: Outbox[FromRank]) -> None:
    """Every step's results, in order, as they are computed. An error ends the process: no step may go missing."""
    try:
        while True:
            results.send(launched.get().collect())
    except RuntimeError as error:
        device_failed(link, error)
    except Exception as error:  # else this thread alone would end, and the scheduler wait for ever
        logging.getLogger(__name__).exception("stopped by an error")
        link.fatal(f"{type(error).__name__}: {error}")


def device_failed(link: ParentLink, error: RuntimeError) -> NoReturn:
    """Out of memory, or broken: what is queued on it is lost."""
    logging.getLogger(__name__).exception("the device failed")
    link.fatal(f"the device failed: {error}")


def announce(link: ParentLink, results: Outbox[FromRank], ready: Ready) -> None:
    """The rank is ready; what lives now lives to the end, so that no collection looks at it again."""
    results.send(ready)
    gc.collect()
    gc.freeze()
    link.report(Started())


def build(spec: ChildSpec) -> tuple[Ready, Callable[[Step], Launched]]:
    """What fits, and what launches a step. Raises ModelError."""
    config, model_dir = spec.config, Path(spec.model_dir)
    shape = read_spec(model_dir)
    # Before torch loads: threads that wait for work by spinning starve the other processes (measured: 5 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Steps differ in size: blocks that cannot grow would leave more and more memory in pieces.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from toka_async.runner.build import build_runner
    from toka_async.runner.devices import take_gpus

    if config.model.device != "cpu":
        take_gpus(spec.replica, config.parallel.dp, len(spec.topology.ranks[spec.replica]))
    runner = build_runner(
        model_dir,
        shape,
        config.model,
        config.cache,
        config.schedule,
        config.attention,
        config.compile,
        num_sharing=config.parallel.dp,
    )
    return runner.ready, runner.launch
