"""The scheduler process of one replica: a blocking loop that carries messages between sockets and the core.

Loads no torch and no event loop; decides nothing itself.
"""

from __future__ import annotations

import gc
import time

import msgspec
import numpy.ma  # noqa: F401  `np.unique` loads it, which would delay the first step
import zmq

from toka_async.config import Config, ScheduleConfig
from toka_async.control import ControlDone
from toka_async.messages import ExpertLoads, FromRank, Ready, StageTimes, ToRank, ToScheduler, ToServer
from toka_async.procs.child import ParentLink, Started
from toka_async.procs.progress import WorkProgress, answer_while_moving
from toka_async.procs.step_times import StepTimes
from toka_async.scheduler.core import Core
from toka_async.scheduler.step_budget import StepLimits
from toka_async.transport.base import BatchOutbox, EveryOutbox, Inbox, Outbox
from toka_async.transport.codec import Codec
from toka_async.transport.life_sockets import LifeSockets
from toka_async.transport.zmq_sockets import PollSet, ZmqInbox, ZmqOutbox

# Reference counting frees what a request needs. Collections only cost time, more with every waiting request.
COLLECTED = (50_000, 20, 50)
# Seconds of a step with prompts. A reader notices longer gaps than 50 ms; larger steps are hardly more efficient.
AUTO_STREAMING_STEP = 0.040
AUTO_DECODINGS = 8.0  # see StepLimits
AUTO_STEP = 0.125


def run(link: ParentLink) -> None:
    """Serve one replica until the parent ends this process."""
    spec, topology = link.spec, link.spec.topology
    places = spec.places
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = LifeSockets(context, places.keys, spec.config.server.hang_timeout, link.fatal)
    requests: ZmqInbox[ToScheduler] = ZmqInbox(context, topology.schedulers[spec.replica], Codec(ToScheduler))
    results: ZmqInbox[FromRank] = sockets.listen(places.results, Codec(FromRank), spec.listen_fd)
    server: ZmqOutbox[ToServer] = ZmqOutbox(context, topology.server, Codec(ToServer))
    ranks: EveryOutbox[ToRank] = EveryOutbox([sockets.connect(address, Codec(ToRank)) for address in places.ranks])
    sockets.watch()
    ready = msgspec.structs.replace(wait_ready(results, len(places.ranks)), replica=spec.replica, life=spec.life)
    if ready.max_tokens < ready.max_seqs:
        link.fatal(f"schedule.max_tokens: expected at least schedule.max_seqs ({ready.max_seqs})", user=True)
    core = make_core(ready, spec.config)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    server.send(ready)
    link.report(Started())
    poll, times, progress = PollSet([results, requests]), StepTimes(), WorkProgress()
    answer_while_moving(link, progress, spec.config.server.hang_timeout, "a turn of the scheduler")
    while True:
        poll.wait()
        progress.begin()
        run_turn(core, requests, results, server, ranks, times, ready)
        progress.end()


def wait_ready(results: ZmqInbox[FromRank], num_ranks: int) -> Ready:
    """Wait for Ready of all ranks and merge it: they agree on what they hold, and each has its own device."""
    each = [message for message in (results.receive() for _ in range(num_ranks)) if isinstance(message, Ready)]
    assert len(each) == num_ranks, "a rank's first message is Ready"
    ready, *others = [msgspec.structs.replace(one, ranks=()) for one in each]
    assert all(other == ready for other in others), f"{[ready, *others]}"
    ranks = sorted((rank for one in each for rank in one.ranks), key=lambda rank: rank.rank)
    return msgspec.structs.replace(ready, ranks=tuple(ranks))


def make_core(ready: Ready, config: Config) -> Core:
    """Make the core for what the ranks can hold; they have resolved `auto`."""
    schedule, parallel = config.schedule, config.parallel
    return Core(
        ready,
        max_tokens=ready.max_tokens,
        step_limits=make_step_limits(schedule),
        steps_ahead=schedule.steps_ahead,
        pipeline_lag=(parallel.pp - 1) / parallel.num_micro_batches,
        prefix=config.cache.prefix,
        group_min_seqs=ready.group_min_seqs if schedule.group_min_seqs == "auto" else schedule.group_min_seqs,
        group_min_tokens=ready.group_min_tokens if schedule.group_min_tokens == "auto" else schedule.group_min_tokens,
    )


def make_step_limits(schedule: ScheduleConfig) -> StepLimits:
    """Make the limits of a step's time. With `auto`, they are shorter while somebody waits for a stream's tokens."""
    if schedule.max_step_ms == "auto":
        return StepLimits(seconds=AUTO_STEP, streaming=AUTO_STREAMING_STEP, decodings=AUTO_DECODINGS)
    if schedule.max_step_ms == 0:
        return StepLimits()
    return StepLimits(schedule.max_step_ms / 1000, schedule.max_step_ms / 1000)


def run_turn(
    core: Core,
    requests: Inbox[ToScheduler],
    results: Inbox[FromRank],
    server: BatchOutbox[ToServer],
    ranks: Outbox[ToRank],
    times: StepTimes,
    ready: Ready,
) -> None:
    """Handle all that has arrived, queue the next steps, and only then tell the server: ranks must not wait.

    While they have a step, the first tokens of prompts go before the next steps: somebody waits for these.
    """
    now = time.monotonic()
    times.begin()
    num_completed = 0
    for result in results.drain():
        assert not isinstance(result, Ready), "a rank is ready once"
        if isinstance(result, StageTimes):
            core.note_stage_times(result)
            continue
        if isinstance(result, ExpertLoads):
            core.note_expert_loads(result)
            continue
        if isinstance(result, ControlDone):
            core.complete_order(result)
            continue
        core.complete(result, now)
        num_completed += 1
    times.lap("results")
    for request in requests.drain():
        core.receive(request, now)
    times.lap("requests")
    if core.has_first_tokens and core.num_in_flight:
        tell_server(core, server, times, ready)
    for step in core.next_steps(now):
        ranks.send(step)
    while (order := core.next_order()) is not None:
        ranks.send(order)
    core.note_sent(time.monotonic())
    times.lap("steps")
    tell_server(core, server, times, ready)
    if (stats := core.take_stats(now)) is not None:
        server.send(msgspec.structs.replace(times.fill(stats), replica=ready.replica, life=ready.life))
        times.lap("messages")
    times.end(num_completed)


def tell_server(core: Core, server: BatchOutbox[ToServer], times: StepTimes, ready: Ready) -> None:
    """Send what the server does not know yet, except statistics."""
    messages = core.take_messages()
    for place, message in enumerate(messages):
        if isinstance(message, ControlDone):
            messages[place] = msgspec.structs.replace(message, replica=ready.replica, life=ready.life)
    server.send_all(messages)
    times.lap("messages")
