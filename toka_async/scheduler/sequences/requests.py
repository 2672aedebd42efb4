"""The scheduler's records of a request, of a prompt on the ranks, and of a prompt that waits to be computed.

They are touched when something starts or ends, never per token. Know no bookkeeping of pages and no sequence table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Float32, Int32, Int64
from toka_async.messages import Submit
from toka_async.scheduler.cache.prefix_tree import Node
from toka_async.scheduler.sequences.token_log import TokenColumns

Top = tuple[Int32, Float32]  # the likeliest ids at a place and their log-probs, both [k]

UInt64 = npt.NDArray[np.uint64]
MASK = 2**64 - 1


@dataclass(slots=True)
class PrefillScores:
    """Log-probs of a prompt's tokens, filled chunk by chunk: entry i belongs to token i + 1."""

    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


@dataclass(slots=True, eq=False)
class Request:
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
    waiting: dict[int, PrefillTask] = field(default_factory=dict)  # tasks in the queue, by sample
    group: int = 0  # in the length predictor
    since: float = 0.0  # time of arrival, seconds

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
    def is_prompt_only(self) -> bool:
        return self.submit.max_tokens == 0

    @property
    def num_pending(self) -> int:
        """For n > 1: samples that have not started."""
        return self.submit.n - self.next_sample

    @property
    def has_begun(self) -> bool:
        """Its prompt has been opened."""
        return self.num_found >= 0

    def columns(self) -> tuple[int, ...]:
        """The request's entries in the sequence table, in the order of `SequenceTable.describe`."""
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
            sampling.wants_kept,
            self.stop_row,
            sampling.min_tokens,
        )


@dataclass(slots=True)
class Generated:
    """Tokens of a preempted sequence, kept until it runs again. since: when the last token came."""

    columns: TokenColumns
    tops: list[Top] | None
    since: float = 0.0

    @property
    def tokens(self) -> Int32:
        return self.columns.token_ids


@dataclass(slots=True, eq=False)
class PrefillTask:
    """A prompt to compute: a request's own (`sample` 0, or -1 for n > 1), or a preempted sample's with its tokens."""

    request: Request
    sample: int
    token_ids: Int32
    generated: Generated | None = None
    was_preempted: bool = False
    cancelled: bool = False

    @property
    def forks(self) -> bool:
        """Several samples start from the computed prompt."""
        return self.sample < 0 and not self.request.is_prompt_only

    @property
    def order(self) -> tuple[int, int, int]:
        """Priority, arrival, sample; lower runs first."""
        sample = self.sample if self.sample >= 0 else self.request.next_sample
        return (self.request.submit.priority, self.request.arrival, sample)


@dataclass(slots=True, eq=False)
class PromptRun:
    """A prompt on the ranks and the pages that all of its sequences share, until the last of them ends.

    For n = 1 the sample's own sequence computes the whole prompt. For n > 1 a sequence that is no sample (sample -1)
    computes all of the prompt but its last token. Every sample then starts as a decoding row whose token is the
    prompt's last, on a copy of the page that is not full (`tail_page`). A model with recurrent states keeps the state
    that they start with in a snapshot, which the run holds until all have started.

    window_first, window_end: the places of the pages whose window pages it holds, of a model with windows.
    """

    key: int
    task: PrefillTask
    num_to_compute: int
    num_found: int  # tokens found in the prefix tree
    num_computed: int  # found, or built into steps
    nodes: list[Node]  # a chain from the prefix tree's root: nodes found, then inserted
    pages: Int32  # shared full pages in order; those beyond `nodes` are the run's own
    tail_page: int = -1
    begins_with: int = -1  # the snapshot with which computing begins; -1: it begins without a state
    snapshot: int = -1  # that it holds: of the state with which its samples start
    saves: tuple[int, ...] = ()  # ends of pages where the state is worth keeping, in tokens, ascending
    seq: int = -1  # the sequence that computes the prompt; -1: nothing (left) to compute
    num_seqs: int = 0  # sequences that hold pages of the run, the computing one included
    closed: bool = False
    stopped: bool = False  # no more samples start from it
    epoch: int = 0  # of the prefix tree
    window_first: int = 0
    window_end: int = 0
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.task.request

    @property
    def forks(self) -> bool:
        """Several samples start from the computed prompt."""
        return self.task.forks

    @property
    def computed(self) -> bool:
        return self.num_computed == self.num_to_compute

    @property
    def num_pending(self) -> int:
        return self.request.num_pending if self.forks and not self.stopped else 0

    def own_pages(self) -> Int32:
        """Pages of the run that are not in the prefix tree."""
        pages = self.pages[len(self.nodes) :]
        return np.append(pages, np.int32(self.tail_page)) if self.tail_page >= 0 else pages


def sample_seeds(seed: int | UInt64, samples: Int32) -> Int64:
    """Seeds of samples, int64 [samples]: splitmix64 (Steele et al. 2014) of (seed, sample); `seed` may be [samples]."""
    with np.errstate(over="ignore"):
        x = (np.uint64(seed & MASK) if isinstance(seed, int) else seed) + (
            samples.astype(np.uint64) + np.uint64(1)
        ) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))).view(np.int64)
