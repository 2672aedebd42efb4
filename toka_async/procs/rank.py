"""A rank's process: runs the scheduler's steps in order and sends back what they sampled.

Knows nothing of requests; what a step computes is the runner's business.
"""

from __future__ import annotations

import gc
from pathlib import Path

import zmq

from toka_async.messages import FromRank, ToRank
from toka_async.model.spec import ModelError, read_spec
from toka_async.procs.child import ParentLink, Started
from toka_async.runner.build import build_runner
from toka_async.transport.codec import Codec
from toka_async.transport.zmq_sockets import ZmqInbox, ZmqOutbox


def run(link: ParentLink) -> None:
    """Run steps until the parent ends this process."""
    spec, topology = link.spec, link.spec.topology
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    steps: ZmqInbox[ToRank] = ZmqInbox(context, topology.ranks[spec.replica][spec.rank], Codec(ToRank))
    results: ZmqOutbox[FromRank] = ZmqOutbox(context, topology.scheduler_ranks[spec.replica], Codec(FromRank))
    config, model_dir = spec.config, Path(spec.model_dir)
    try:
        runner = build_runner(
            model_dir, read_spec(model_dir), config.model, config.cache, config.schedule, config.attention
        )
    except ModelError as error:
        link.fatal(str(error), user=True)
    results.send(runner.ready)
    gc.collect()
    gc.freeze()
    link.report(Started())
    while True:
        results.send(runner.run(steps.receive()))
