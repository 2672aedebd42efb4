"""A scheduler and its ranks in a few lines, for tests of the server: the tokens follow from the request alone.

Messages pass through the real codecs both ways. It steps when the event loop is idle, one token a sample and step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from toka_async.arrays import Int32, as_bool, as_i32, f32_column, i32_column
from toka_async.control import (
    AbandonUpdate,
    Abort,
    Checksum,
    Control,
    ControlDone,
    LoadTensors,
    PartRows,
    PartSum,
    Pause,
    PauseMode,
    ReadTensor,
    Resume,
)
from toka_async.messages import (
    GAP_SECONDS,
    AskStats,
    Cancels,
    DropStop,
    EndSample,
    Failed,
    Prefilled,
    Prefills,
    Ready,
    Reason,
    Stats,
    StopChecks,
    StopMask,
    Submit,
    Submits,
    Tokens,
    ToScheduler,
    ToServer,
)
from toka_async.scheduler.core import split_submits
from toka_async.transport.codec import Codec
from toka_async.transport.local import LocalChannel

READY = Ready(num_pages=256, page_size=16, max_seqs=64, max_context=512, vocab_size=400)

Script = Callable[[Submit, int], list[int]]


def random_tokens(submit: Submit, sample: int) -> list[int]:
    """Pseudo-random ids below 256, from the seed; more than anybody asks for."""
    random = np.random.default_rng([submit.seed % 2**63, sample])
    return [int(token_id) for token_id in random.integers(3, 256, size=submit.max_tokens)]


@dataclass
class FakeSample:
    planned: list[int]
    done: int = 0
    sent: int = 0
    reason: Reason = Reason.NONE
    ends_at: int | None = None
    versions: list[str] = field(default_factory=list)  # of each token


@dataclass
class FakeRequest:
    submit: Submit
    samples: list[FakeSample] = field(default_factory=list)
    prefilled: bool = False


class FakeScheduler:
    """Is the server's outbox; calls `deliver` with what it sends.

    Args:
        script: the tokens that a sample would generate if nothing ended it.
        held: with it, steps happen only by calls of `step`.

    Attributes:
        version: of the weights that generate tokens.
        log: messages, as they came. submits, cancelled: the requests of those messages, one by one.

    Questions for its counts are answered at once, held or not, unless it is `silent`.
    """

    def __init__(self, script: Script = random_tokens, ready: Ready | None = READY, held: bool = False) -> None:
        self.script = script
        self.deliver: Callable[[list[ToServer]], None] = list.clear
        self.requests: dict[int, FakeRequest] = {}
        self.masks: dict[int, StopMask] = {}
        self.log: list[ToScheduler] = []
        self.submits: list[Submit] = []
        self.cancelled: list[int] = []
        self.fail_with: str | None = None
        self.silent = False
        self.paused: PauseMode | None = None
        self.control_error = ""
        self.version = "default"
        self.failing_act = ""  # the only one that fails; empty: all do
        self.fails_once = False
        self.num_written = 0
        self.weights = 5
        self.acts: list[str] = []
        self.held = held
        self.generated = 0
        self.gaps = 0
        self.asked = 0
        self._ready = ready
        self._inbox: LocalChannel[ToScheduler] = LocalChannel(Codec(ToScheduler))
        self._replies: LocalChannel[ToServer] = LocalChannel(Codec(ToServer))
        self._scheduled = False

    def start(self, deliver: Callable[[list[ToServer]], None]) -> None:
        self.deliver = deliver
        if self._ready is not None:
            deliver([self._ready])

    # ---- the outbox --------------------------------------------------------------------------------------------------

    def send(self, message: ToScheduler) -> None:
        if isinstance(message, AskStats):
            self.asked = message.number
            if not self.silent:
                asyncio.get_running_loop().call_soon(lambda: self.deliver([self._stats()]))
            return
        self._inbox.send(message)
        self._schedule()

    def close(self) -> None:
        self._inbox.close()

    # ---- the scheduler -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Takes what has come, generates a token for each sample, and delivers."""
        self._scheduled = False
        for message in self._inbox.drain():
            self.log.append(message)
            self._take(message)
        for request_id, request in [] if self.paused else list(self.requests.items()):
            self._prefill(request_id, request)
            self._generate(request_id, request)
            if all(sample.reason is not Reason.NONE for sample in request.samples):
                del self.requests[request_id]
        self._replies.send(self._stats())
        self.deliver(self._replies.drain())
        if self.requests and not self.paused:
            self._schedule()

    def _stats(self) -> Stats:
        return Stats(
            num_running=len(self.requests),
            generated_tokens=self.generated,
            num_pages=READY.num_pages,
            token_gaps=(self.gaps, *([0] * len(GAP_SECONDS))),
            answers=self.asked,
            replica=self._ready.replica if self._ready else 0,
            life=self._ready.life if self._ready else 0,
        )

    def _schedule(self) -> None:
        if not self._scheduled and not self.held:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.step)

    def _take(self, message: ToScheduler) -> None:
        match message:
            case Submits():
                for submit in split_submits(message):
                    self._submit(submit)
            case Cancels():
                self.cancelled += as_i32(message.request_ids).tolist()
                for request_id in as_i32(message.request_ids).tolist():
                    self.requests.pop(request_id, None)
            case StopMask():
                self.masks[message.stop_id] = message
            case DropStop():
                del self.masks[message.stop_id]
            case EndSample():
                if request := self.requests.get(message.request_id):
                    request.samples[message.sample].ends_at = message.num_tokens
            case Control():
                self._replies.send(self._control(message))

    def _control(self, message: Control) -> ControlDone:
        count = self.num_written if isinstance(message.action, LoadTensors) else 0
        self.acts.append(type(message.action).__name__)
        sums = (PartSum("w", "0+1", self.weights),) if isinstance(message.action, Checksum) else ()
        rows = [self._read(part) for part in range(2) if isinstance(message.action, ReadTensor)]
        match message.action:
            case Pause(mode=mode):
                self.paused = mode
                count = self._abort([*self.requests] if mode == "abort" else [])
            case Resume():
                self.paused = None
            case Abort(request_ids=ids, everything=everything):
                count = self._abort([*self.requests] if everything else as_i32(ids).tolist())
            case AbandonUpdate():
                self.paused = self.paused or "keep"
        error = self.control_error if self.failing_act in ("", self.acts[-1]) else ""
        if error and self.fails_once:
            self.control_error = ""
        replica, life = (self._ready.replica, self._ready.life) if self._ready else (0, 0)
        return ControlDone(
            number=message.number,
            replica=replica,
            life=life,
            count=count,
            error=error,
            sums=sums,
            rows=() if error else tuple(rows),
        )

    def _read(self, part: int) -> PartRows:
        """Half of a tensor of two columns."""
        return PartRows(shape=(2, 2), starts=(0, part), sizes=(2, 1), values=f32_column([self.weights, math.nan]))

    def _abort(self, request_ids: list[int]) -> int:
        found = [request_id for request_id in request_ids if request_id in self.requests]
        for request_id in found:
            request = self.requests.pop(request_id)
            for index, sample in enumerate(request.samples):
                if sample.reason is Reason.NONE:
                    sample.reason = Reason.ABORT
                    self._send_row(request_id, request, index)
        return len(found)

    def _submit(self, submit: Submit) -> None:
        self.submits.append(submit)
        if self.fail_with:
            self._replies.send(Failed(request_id=submit.request_id, message=self.fail_with))
            return
        assert submit.stop_id < 0 or submit.stop_id in self.masks
        samples = [FakeSample(self.script(submit, index)[: submit.max_tokens]) for index in range(submit.n)]
        self.requests[submit.request_id] = FakeRequest(submit, samples)

    def _prefill(self, request_id: int, request: FakeRequest) -> None:
        if request.prefilled:
            return
        request.prefilled = True
        width = request.submit.sampling.num_prompt_logprobs
        if width < 0:
            cached = len(as_i32(request.submit.prompt)) // 16 * 16
            self._replies.send(Prefills(request_ids=i32_column([request_id]), cached_tokens=i32_column([cached])))
            return
        rest = as_i32(request.submit.prompt)[1:]
        top = top_of(rest, max(width, 0))
        self._replies.send(
            Prefilled(
                request_id=request_id,
                cached_tokens=len(as_i32(request.submit.prompt)) // 16 * 16,
                logprobs=f32_column(select_logprobs(rest)),
                ranks=i32_column(rest + 1),
                top_ids=i32_column(top.ravel()),
                top_logprobs=f32_column(select_logprobs(top.ravel())),
            )
        )

    def _generate(self, request_id: int, request: FakeRequest) -> None:
        ends = as_i32(request.submit.sampling.end_ids).tolist()
        for index, sample in enumerate(request.samples):
            if sample.reason is not Reason.NONE:
                continue
            if sample.done < len(sample.planned):
                sample.done += 1
                sample.versions.append(self.version)
                self.generated += 1
                self.gaps += sample.done > 1
            last = sample.planned[sample.done - 1] if sample.done else -1
            if sample.ends_at is not None:
                sample.done, sample.reason = max(sample.sent, sample.ends_at), Reason.STOP_STRING
            elif last in ends and sample.done > request.submit.sampling.min_tokens:
                sample.reason = Reason.STOP
            elif sample.done == len(sample.planned):
                sample.reason = Reason.LENGTH
            self._check_stop(request_id, request, index, last)
            if request.submit.stream or sample.reason is not Reason.NONE:
                self._send_row(request_id, request, index)

    def _check_stop(self, request_id: int, request: FakeRequest, index: int, last: int) -> None:
        sample, stop = request.samples[index], self.masks.get(request.submit.stop_id)
        if stop is None or last < 0 or sample.reason is not Reason.NONE or not as_bool(stop.mask)[last]:
            return
        window = sample.planned[max(0, sample.done - stop.window) : sample.done]
        self._replies.send(
            StopChecks(
                request_ids=i32_column([request_id]),
                samples=i32_column([index]),
                num_tokens=i32_column([sample.done]),
                counts=i32_column([len(window)]),
                token_ids=i32_column(window),
            )
        )

    def _send_row(self, request_id: int, request: FakeRequest, index: int) -> None:
        sample, width = request.samples[index], request.submit.sampling.num_logprobs
        ids = np.array(sample.planned[sample.sent : sample.done], dtype=np.int32)
        versions = sample.versions[sample.sent : sample.done] or [self.version]
        names = list(dict.fromkeys(reversed(versions)))
        pairs = enumerate(pairwise(versions), start=1)
        spans = [(0, end, names.index(version)) for end, (version, following) in pairs if version != following]
        sample.sent = sample.done
        top = top_of(ids, max(width, 0))
        kept = kept_of(ids) if request.submit.sampling.wants_kept else ids[:0]
        self._replies.send(
            Tokens(
                request_ids=i32_column([request_id]),
                samples=i32_column([index]),
                counts=i32_column([len(ids)]),
                reasons=i32_column([int(sample.reason)]),
                token_ids=i32_column(ids),
                num_logprobs=width,
                logprobs=f32_column(select_logprobs(ids)) if width >= 0 else memoryview(b""),
                top_ids=i32_column(top.ravel()),
                top_logprobs=f32_column(select_logprobs(top.ravel())),
                kept=i32_column(kept),
                masses=f32_column(1 / kept),
                versions=tuple(names),
                spans=i32_column([number for span in spans for number in span]),
            )
        )


def kept_of(ids: Int32) -> Int32:
    """How many tokens filters keep where these are drawn, which follows from the id."""
    return ids % 7 + 1


def select_logprobs(
    ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A log-prob that follows from the id: even ids are likelier than odd ones."""
    return (-0.1 - (ids % 2) - ids / 1000).astype(np.float32)


def top_of(
    ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]], width: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """The likeliest ids at each place [t, width]: the even ones from the token's own on (an odd id is not in it)."""
    even = ids + ids % 2
    return (even[:, None] + 2 * np.arange(width, dtype=np.int32)[None, :]).astype(np.int32)
