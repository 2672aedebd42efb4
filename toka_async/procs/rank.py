"""A rank's process: runs the scheduler's steps in order and sends back what they sampled.

Knows nothing of requests; what a step computes is the runner's business. Loads torch only for a device that computes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import zmq

from toka_async.messages import FromRank, Ready, Step, StepDone, ToRank
from toka_async.model.spec import ModelError, read_spec
from toka_async.procs.child import ChildSpec, ParentLink, Started
from toka_async.runner.simulated import SimulatedRank, simulated_ready
from toka_async.transport.codec import Codec
from toka_async.transport.zmq_sockets import ZmqInbox, ZmqOutbox


def run(link: ParentLink) -> None:
    """Run steps until the parent ends this process."""
    spec, topology = link.spec, link.spec.topology
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    steps: ZmqInbox[ToRank] = ZmqInbox(context, topology.ranks[spec.replica][spec.rank], Codec(ToRank))
    results: ZmqOutbox[FromRank] = ZmqOutbox(context, topology.scheduler_ranks[spec.replica], Codec(FromRank))
    try:
        ready, run_step, wait = build(spec)
    except ModelError as error:
        link.fatal(str(error), user=True)
    results.send(ready)
    gc.collect()
    gc.freeze()
    link.report(Started())
    while True:
        queued = steps.drain()
        if not queued:
            wait()
            queued = [steps.receive()]
        for step in queued:
            for part in step.passes():
                results.send(run_step(part))


def build(spec: ChildSpec) -> tuple[Ready, Callable[[Step], StepDone], Callable[[], None]]:
    """What fits, what runs a step, and what is called when none is queued. Raises ModelError."""
    config, model_dir = spec.config, Path(spec.model_dir)
    shape = read_spec(model_dir)
    if config.model.device == "simulated":
        ready = simulated_ready(shape, config.model, config.cache, config.schedule)
        rank = SimulatedRank(ready, config.simulated)
        return ready, rank.run, rank.wait
    # Before torch loads: threads that wait for work by spinning starve the other processes (measured: 5 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from toka_async.runner.build import build_runner

    runner = build_runner(model_dir, shape, config.model, config.cache, config.schedule, config.attention)
    return runner.ready, runner.run, do_nothing


def do_nothing() -> None:
    """A device that computes keeps no time of its own."""
