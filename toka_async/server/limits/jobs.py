"""What the server asks of the engine, and why it may be refused."""

from __future__ import annotations

from dataclasses import dataclass

from toka_async.arrays import Int32
from toka_async.messages import SamplingParams


class NotServingError(Exception):
    """No requests are taken: the engine is not ready yet, draining, or gone. The message says which."""


class OverloadedError(Exception):
    """As many requests or tokens as are allowed are held already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt to be submitted: token ids [p] and what to generate after it.

    salt: see Submit. in_blocks: see InFlight.
    """

    prompt: Int32
    n: int
    max_tokens: int
    seed: int
    sampling: SamplingParams
    stream: bool
    priority: int
    stop_id: int = -1
    salt: int = 0
    in_blocks: bool = False
