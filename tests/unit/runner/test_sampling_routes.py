"""How rows are sampled: by needs of their parameters, and by the length at which min_tokens ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toka_async.arrays import column, f32_column, i32_column
from toka_async.messages import Prompt, Ready, Step, TokenSampling
from toka_async.runner.rows import RowTables
from toka_async.runner.sampling_routes import Route, SamplingRoutes

READY = Ready(num_pages=40, page_size=4, max_seqs=6, max_context=60, vocab_size=20, max_tokens=64)
ENDS = i32_column([1])
PROMPT = [5, 6, 7]
PLAIN = TokenSampling(temperature=0.5, top_p=0.9, repetition_penalty=1.2)
HELD = TokenSampling(min_tokens=3, end_ids=ENDS)
COUNTED = TokenSampling(frequency_penalty=1.0)
LIKELIEST = TokenSampling(num_logprobs=4)


class Routes:
    """Rows by slot, of which those in `by_torch` are not for kernels."""

    def __init__(self, samplings: dict[int, TokenSampling], by_torch: tuple[int, ...] = (), num_prompt: int = 3):
        self.rows = RowTables(READY, torch.device("cpu"))
        slots = [*samplings]
        prompts = (
            Prompt(key=slot, token_ids=i32_column(PROMPT), num_prompt=num_prompt, pages=i32_column([]), sampling=each)
            for slot, each in samplings.items()
        )
        step = Step(
            step_id=0,
            prompts=tuple(prompts),
            admit_slots=i32_column(slots),
            admit_keys=i32_column(slots),
            admit_starts=i32_column([0] * len(slots)),
            admit_seeds=column(np.zeros(len(slots), dtype=np.int64)),
        )
        self.routes = SamplingRoutes(self.rows)
        self.routes.admit(self.rows.apply(step), np.isin(slots, by_torch))
        self.rows.positions[slots] = len(PROMPT)

    def decode(self, slots: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Route:
        """The route of the rows' next tokens, which are then computed."""
        route = self.routes.find_decoding(slots).route
        self.rows.positions[slots] += 1
        return route


@pytest.mark.parametrize(
    ("sampling", "route"),
    [
        (PLAIN, Route.PLAIN),
        (TokenSampling(num_logprobs=0), Route.PLAIN),
        (HELD, Route.FULL),
        (COUNTED, Route.FULL),
        (TokenSampling(presence_penalty=-0.1), Route.FULL),
        (TokenSampling(bias_ids=i32_column([3]), bias_values=f32_column([1.0])), Route.FULL),
        (LIKELIEST, Route.FULL),
        (TokenSampling(min_tokens=3), Route.PLAIN),  # there is no end token
        (TokenSampling(min_tokens=1, end_ids=ENDS), Route.PLAIN),  # its first token is of the prompt's step
    ],
)
def test_the_route_of_decoding_rows(sampling: TokenSampling, route: Route) -> None:
    routes = Routes({2: PLAIN, 4: sampling})
    assert routes.decode(np.array([4, 2], dtype=np.int32)) is route
    assert routes.decode(np.array([2], dtype=np.int32)) is Route.PLAIN


def test_one_row_of_plain_torch_decides() -> None:
    routes = Routes({1: PLAIN, 2: LIKELIEST, 3: COUNTED}, by_torch=(2,))
    assert routes.decode(np.array([1, 2], dtype=np.int32)) is Route.TORCH
    needs = routes.routes.find(np.array([3, 1, 2], dtype=np.int32), np.array([4, 4, 4]))
    assert needs.by_torch.tolist() == [2]
    assert needs.full
    assert needs.wants_logprobs
    assert needs.top is None


def test_edits_end_with_the_last_of_min_tokens() -> None:
    later = TokenSampling(min_tokens=5, end_ids=ENDS)
    routes, slots = Routes({0: HELD, 1: PLAIN, 3: later}), np.array([3, 1, 0], dtype=np.int32)
    assert [routes.decode(slots) for _ in range(6)] == [Route.FULL] * 4 + [Route.PLAIN] * 2


def test_log_probs_keep_the_route_when_min_tokens_end() -> None:
    """Otherwise a neighbour's needs would decide how they are rounded."""
    routes = Routes({0: TokenSampling(min_tokens=3, end_ids=ENDS, num_logprobs=0)})
    slots = np.array([0], dtype=np.int32)
    assert [routes.decode(slots) for _ in range(5)] == [Route.FULL] * 5


def test_other_edits_outlast_min_tokens() -> None:
    routes, slots = Routes({0: HELD, 1: COUNTED}), np.array([0, 1], dtype=np.int32)
    assert {routes.decode(slots) for _ in range(6)} == {Route.FULL}


def test_tokens_before_a_preemption_count() -> None:
    """One of the prompt's three ids is the row's own."""
    routes, slots = Routes({0: HELD}, num_prompt=2), np.array([0], dtype=np.int32)
    assert [routes.decode(slots) for _ in range(3)] == [Route.FULL, Route.PLAIN, Route.PLAIN]


def test_a_slots_next_row_has_its_own_needs() -> None:
    routes = Routes({0: HELD})
    routes.routes.admit(np.array([0], dtype=np.int32), np.array([True]))
    assert routes.decode(np.array([0], dtype=np.int32)) is Route.TORCH
    routes.rows.params[0] = routes.rows.params[1]
    routes.routes.admit(np.array([0], dtype=np.int32), np.array([False]))
    assert routes.decode(np.array([0], dtype=np.int32)) is Route.PLAIN


def test_rows_with_likeliest_tokens() -> None:
    """No more of them than the vocabulary has; their places are on the device, unless they are all rows."""
    routes = Routes({0: PLAIN, 1: LIKELIEST, 2: TokenSampling(num_logprobs=0), 3: TokenSampling(num_logprobs=99)})
    top = routes.routes.find_decoding(np.array([1, 0, 3, 2], dtype=np.int32)).top
    assert top is not None
    assert (top.rows.tolist(), top.counts.tolist()) == ([0, 2], [4, 20])
    alone = routes.routes.find_decoding(np.array([1], dtype=np.int32)).top
    assert alone is not None
    assert (alone.rows.tolist(), alone.counts.tolist()) == ([0], [4])


def test_decisions_are_remembered_by_array() -> None:
    routes, slots = Routes({0: LIKELIEST, 1: PLAIN}), np.array([0, 1], dtype=np.int32)
    needs = routes.routes.find_decoding(slots)
    assert routes.routes.find_decoding(slots) is needs
    assert routes.routes.find_decoding(slots.copy()) is not needs
    for _ in range(100):
        routes.routes.find_decoding(slots.copy())
    assert routes.routes.find_decoding(slots) is not needs
