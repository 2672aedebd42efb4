"""What a stage waits for, and what it passes on."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from tests.drivers.stage_runners import MemoryLink, setups
from tests.unit.runner.test_micro_batches import step_rows
from toka_async.runner.device_rows import DeviceRows
from toka_async.runner.inputs import StepRows
from toka_async.runner.pipeline import Pipeline

HIDDEN = 3
MAX_SEQS = 200


class Stages:
    """Pipelines of several stages; the first one's rows are `rows`."""

    def __init__(self, num_stages: int, capacity: int = 100) -> None:
        made = setups(num_stages, num_stages + 1, HIDDEN, torch.float32, capacity=capacity)
        tables = [DeviceRows(MAX_SEQS, 4, 4, 0, torch.device("cpu")) for _ in made]
        self.rows = tables[0]
        self.stages = [Pipeline(setup, rows) for setup, rows in zip(made, tables, strict=True)]
        self.back = cast(MemoryLink, made[0].links.tokens_from_last)

    def run_first(self, rows: StepRows) -> None:
        assert self.stages[0].receive(rows) is None
        self.stages[0].pass_on(rows, self.residuals(rows), None)

    def run_others(self, rows: StepRows, tokens: list[int]) -> None:
        for stage in self.stages[1:]:
            residuals = stage.receive(rows)
            assert residuals is not None
            assert torch.equal(residuals, self.residuals(rows))
            is_last = stage is self.stages[-1]
            stage.pass_on(rows, None if is_last else residuals, torch.tensor(tokens) if is_last and tokens else None)

    @staticmethod
    def residuals(rows: StepRows) -> torch.Tensor:
        count = int(rows.lengths.sum())
        return torch.arange(count * HIDDEN).view(count, HIDDEN).float()

    def last_tokens(self, rows: StepRows) -> list[int]:
        tokens: list[int] = self.rows.last_tokens[rows.slots].tolist()
        return tokens


def decoding(slots: list[int]) -> StepRows:
    rows = step_rows(len(slots), [])
    return StepRows(rows.num_decode, np.array(slots, np.int32), rows.lengths, rows.contexts, rows.firsts, rows.samples)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_first_stage_waits_for_the_tokens_of_its_rows_only(num_stages: int) -> None:
    stages = Stages(num_stages)
    parts = [decoding([0, 1]), decoding([2, 3]), decoding([4])]
    for part in parts:
        stages.run_first(part)  # knows their first tokens
    stages.run_others(parts[0], [10, 11])
    stages.run_first(parts[0])  # of the next step, while two of this one are under way
    assert stages.back.num_taken == 1
    assert stages.last_tokens(parts[0]) == [10, 11]
    with pytest.raises(AssertionError, match="for ever"):
        stages.stages[0].receive(parts[1])


def test_what_came_before_is_taken_too() -> None:
    stages = Stages(2)
    parts = [decoding([0]), decoding([1]), decoding([2])]
    for token, part in enumerate(parts):
        stages.run_first(part)
        stages.run_others(part, [token + 10])
    stages.run_first(parts[2])
    assert stages.back.num_taken == 3
    assert [stages.last_tokens(part) for part in parts] == [[10], [11], [12]]


def test_a_new_row_does_not_wait_for_the_old_ones_token_in_its_slot() -> None:
    stages = Stages(3)
    first = decoding([7, 8])
    stages.run_first(first)
    stages.stages[0].admit(np.array([7], np.int32))
    stages.rows.last_tokens[7] = 5
    stages.run_first(decoding([7]))  # nothing has come back
    assert stages.last_tokens(decoding([7])) == [5]
    stages.run_others(first, [10, 11])
    stages.run_others(decoding([7]), [12])
    stages.run_first(decoding([8]))
    assert stages.last_tokens(decoding([7, 8])) == [5, 11]  # the old row's 10 is nobody's
    stages.run_first(decoding([7]))
    assert stages.last_tokens(decoding([7])) == [12]


def test_chunks_that_sample_nothing_bring_nothing_back() -> None:
    stages = Stages(2)
    rows = step_rows(0, [(4, 0, False), (3, 2, False)])
    stages.run_first(rows)
    stages.run_others(rows, [])
    assert stages.back.num_posted == 0
    sampled = step_rows(0, [(4, 0, True), (3, 2, False)])
    stages.run_first(sampled)
    stages.run_others(sampled, [9])
    stages.run_first(decoding([100]))
    assert stages.last_tokens(decoding([100])) == [9]


def test_no_more_is_under_way_than_there_is_room_for() -> None:
    """Rows that end are never asked for again: their tokens are taken when room is needed."""
    stages = Stages(2, capacity=2)
    for slot in range(6):
        stages.run_first(decoding([slot]))
        stages.run_others(decoding([slot]), [slot + 20])
    assert stages.back.num_posted == 2
    assert stages.back.num_taken == 4
    assert stages.last_tokens(decoding([0, 1, 2, 3])) == [20, 21, 22, 23]


def test_what_another_user_of_the_links_left_is_dropped() -> None:
    made = setups(2, 3, HIDDEN, torch.float32)
    rows = DeviceRows(MAX_SEQS, 4, 4, 0, torch.device("cpu"))
    old = [Pipeline(setup, rows) for setup in made]
    part = decoding([1])
    old[0].receive(part)
    old[0].pass_on(part, torch.zeros(1, HIDDEN), None)
    old[1].receive(part)
    old[1].pass_on(part, None, torch.tensor([3]))
    new = Pipeline(made[0], rows)
    assert cast(MemoryLink, made[0].links.tokens_from_last).num_posted == 0
    assert new.receive(part) is None
    assert rows.last_tokens[1] == 0
