"""What the scheduler keeps of a request, of a prompt on the ranks, and of a prompt that waits to be computed.

Objects touched when something starts or ends, never per token. Knows no pages' bookkeeping and no lanes' columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Float32, Int32, Int64
from toka_async.messages import Submit
from toka_async.scheduler.cache.prefix_tree import Node

Top = tuple[Int32, Float32]  # the likeliest ids at a place and their log-probs, both [k]

UInt64 = npt.NDArray[np.uint64]
MASK = 2**64 - 1


@dataclass(slots=True)
class PrefillScores:
    """Log-probs of a prompt's tokens, filled chunk by chunk: entry i is of token i + 1."""

    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


@dataclass(slots=True, eq=False)
class Request:
    """A user's request: one prompt, n samples."""

    submit: Submit
    prompt: Int32
    arrival: int
    num_open: int  # samples that have not ended
    stop_row: int = -1
    next_sample: int = 0  # for n > 1: samples below it have started
    prefilled: bool = False  # Prefilled was sent
    scores: PrefillScores | None = None
    num_found: int = -1  # prompt tokens found in the prefix tree at first; -1 until the prompt is opened
    shared_run: PromptRun | None = None  # for n > 1: the prompt on the ranks, while samples are to start from it
    waiting: dict[int, PrefillTask] = field(default_factory=dict)  # jobs in the queue, by sample
    group: int = 0  # of the stopping predictor
    since: float = 0.0  # when it arrived, in seconds of the monotonic clock

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def max_tokens(self) -> int:
        return self.submit.max_tokens

    @property
    def can_stop(self) -> bool:
        """A sample may end before max_tokens."""
        return bool(self.submit.sampling.end_ids) or self.stop_row >= 0

    @property
    def prompt_only(self) -> bool:
        return self.submit.max_tokens == 0

    @property
    def num_pending(self) -> int:
        """For n > 1: samples that have not started."""
        return self.submit.n - self.next_sample

    def columns(self) -> tuple[int, ...]:
        """What the lanes' tables have of it, in the order of `Lanes.describe`."""
        submit, sampling = self.submit, self.submit.sampling
        return (
            submit.request_id,
            submit.priority,
            self.arrival,
            submit.max_tokens,
            self.can_stop,
            self.group,
            submit.stream,
            submit.n == 1,
            sampling.num_logprobs,
            self.stop_row,
            sampling.min_tokens,
        )


@dataclass(slots=True)
class Generated:
    """Tokens of a sequence that was preempted, kept until it runs again. since: when the last of them came."""

    tokens: Int32
    logprobs: Float32
    tops: list[Top] | None
    since: float = 0.0


@dataclass(slots=True, eq=False)
class PrefillTask:
    """A prompt to compute: a request's own (`sample` 0, or -1 for n > 1), or a preempted sample's with its tokens."""

    request: Request
    sample: int
    token_ids: Int32
    generated: Generated | None = None
    again: bool = False  # it ran before and was preempted
    cancelled: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Lower runs first: priority, then arrival, then sample."""
        sample = self.sample if self.sample >= 0 else self.request.next_sample
        return (self.request.submit.priority, self.request.arrival, sample)


@dataclass(slots=True, eq=False)
class PromptRun:
    """A prompt on the ranks and the pages that all of its sequences share, until the last of them is done with them.

    A job of one sample computes the whole prompt in that sample's lane. For n > 1 a lane of its own computes all of
    the prompt but its last token; every sample then starts as a decoding row whose token is the prompt's last, on a
    copy of the page that is not full (`tail_page`).
    """

    key: int
    job: PrefillTask
    num_to_compute: int
    num_found: int  # tokens found in the prefix tree
    num_computed: int  # those, and tokens built into steps
    nodes: list[Node]  # of the prefix tree, a chain from the root: pages found, then pages inserted
    pages: Int32  # the shared full pages in order; those past `nodes` are the run's own
    tail_page: int = -1
    lane: int = -1  # computes the prompt; -1 when there is nothing (left) to compute
    num_lanes: int = 0  # lanes that hold pages of the run, the computing one included
    closed: bool = False
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.job.request

    @property
    def forks(self) -> bool:
        """Samples start from the computed prompt, rather than one continuing it."""
        return self.job.sample < 0 and not self.request.prompt_only

    @property
    def computed(self) -> bool:
        return self.num_computed == self.num_to_compute

    @property
    def num_pending(self) -> int:
        return self.request.num_pending if self.forks else 0

    def own_pages(self) -> Int32:
        """Pages that are the run's and not in the prefix tree."""
        pages = self.pages[len(self.nodes) :]
        return np.append(pages, np.int32(self.tail_page)) if self.tail_page >= 0 else pages


def sample_seeds(seed: int | UInt64, samples: Int32) -> Int64:
    """Seeds of samples' random streams: the splitmix64 output function (Steele et al. 2014) of (seed, sample).

    `seed` is of all `samples`, or an array [samples].
    """
    with np.errstate(over="ignore"):
        x = (np.uint64(seed & MASK) if isinstance(seed, int) else seed) + (
            samples.astype(np.uint64) + np.uint64(1)
        ) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))).view(np.int64)
