from __future__ import annotations

import msgspec
import pytest

from toka_async.checkpoint.experts_spec import ExpertNames, ExpertsFeedSpec

FEED = ExpertsFeedSpec(inner=20, activation="silu", num_experts=8, top_k=2, renormalizes=True, names=ExpertNames())


def test_its_matrices() -> None:
    router, gate_up, down = FEED.list_matrices(48, "dense")
    assert (router.names, router.num_outputs, router.num_inputs) == (("mlp.gate",), 8, 48)
    assert (gate_up.num_outputs, gate_up.num_inputs, gate_up.count_bytes(2)) == (40, 48, 2 * 8 * 40 * 48)
    assert (down.num_outputs, down.num_inputs, down.count_bytes(4)) == (48, 20, 4 * 8 * 48 * 20)
    assert [matrix.format for matrix in FEED.list_matrices(48, "other")] == ["dense", "other", "other"]


@pytest.mark.parametrize(("tp", "num_groups"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
def test_ranks_together_do_what_one_does(tp: int, num_groups: int) -> None:
    part = msgspec.structs.replace(FEED, num_groups=num_groups).divide(tp)
    matrices = zip(part.list_matrices(48, "dense")[1:], FEED.list_matrices(48, "dense")[1:], strict=True)
    for own, whole in matrices:
        assert tp * own.count_bytes(2) == whole.count_bytes(2)
        assert tp * own.count_flops(12) == whole.count_flops(12)
        assert tp * own.count_read_bytes(3, 2) == pytest.approx(whole.count_read_bytes(3, 2), abs=tp)
    assert part.count_values(48) == 2 * (part.inner + 48) + 48


def test_what_a_step_reads_and_multiplies() -> None:
    gate_up = FEED.list_matrices(48, "dense")[1]
    assert gate_up.count_read_bytes(1, 2) == gate_up.count_bytes(2) // 4
    assert gate_up.count_read_bytes(1000, 2) >= gate_up.count_bytes(2) - 1
    assert gate_up.count_flops(3) == 2 * 3 * 2 * 40 * 48
    assert gate_up.list_products(1) == (2, 1)
    assert gate_up.list_products(100) == (8, 25)
