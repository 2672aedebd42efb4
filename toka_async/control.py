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


AnyAction = Pause | Resume | Abort | ResetPrefixCache


class Control(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True, kw_only=True):
    """Server -> scheduler, scheduler -> rank: an action. number: the server's, from 1."""

    number: int
    action: AnyAction


class ControlDone(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True, kw_only=True):
    """Rank -> scheduler, scheduler -> server: the end of a Control. error: why it failed; empty: it did not."""

    number: int
    rank: int = 0
    replica: int = 0  # this and `life` as in Ready, filled in by the scheduler
    life: int = 0
    error: str = ""
    count: int = 0
