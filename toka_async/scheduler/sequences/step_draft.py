"""A step while it is being built. Knows sequences and prompt runs, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Bool, Int32
from toka_async.scheduler.cache.prefix_tree import Node
from toka_async.scheduler.sequences.requests import PromptRun, UInt64


@dataclass(slots=True, frozen=True)
class StateSave:
    """The state of a sequence after `length` tokens of its chunk is kept. node: whose it is; None: its run's."""

    seq: int
    length: int
    snapshot: int
    node: Node | None


@dataclass(slots=True)
class StepDraft:
    """The columns of a step while it is being built."""

    admit_seqs: list[Int32] = field(default_factory=list)
    seeds: list[UInt64] = field(default_factory=list)  # of the requests of `admit_seqs`
    copy_sources: list[Int32] = field(default_factory=list)
    copy_targets: list[Int32] = field(default_factory=list)
    page_slots: list[Int32] = field(default_factory=list)
    page_ids: list[Int32] = field(default_factory=list)
    joined: list[Int32] = field(default_factory=list)
    forked: list[Int32] = field(default_factory=list)  # those of `joined` whose first token is this step's
    snapshots: list[Int32] = field(default_factory=list)  # that the rows of `admit_seqs` begin with, or -1
    chunks: list[tuple[PromptRun, int, int]] = field(default_factory=list)  # run, sequence, tokens

    saves: list[StateSave] = field(default_factory=list)

    def chunk_seqs(self) -> Int32:
        return np.asarray([seq for _, seq, _ in self.chunks], dtype=np.int32)

    def chunk_samples(self) -> Bool:
        """Which chunks are the last of a sample's prompt, bool [chunks]."""
        return np.asarray([run.task.sample >= 0 and run.computed for run, _, _ in self.chunks], dtype=np.bool_)

    def add_pages(self, slots: Int32, pages: Int32) -> None:
        self.page_slots.append(slots)
        self.page_ids.append(pages)
