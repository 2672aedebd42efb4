from __future__ import annotations

import pytest
import torch

from tests.cases.experts import draw, make_experts, mix_exactly, take_experts
from toka_async.model.matrices.blocked_ops import BlockedOps
from toka_async.model.matrices.ops import TorchOps
from toka_async.model.matrices.torch_experts import choose_experts

CPU = torch.device("cpu")


@pytest.mark.parametrize(("renormalizes", "is_clamped"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 4, 2), (30, 7, 3), (5, 128, 8), (4, 3, 3)])
def test_it_equals_the_exact_mixture(
    num_tokens: int, num_experts: int, top_k: int, renormalizes: bool, is_clamped: bool
) -> None:
    experts = make_experts(num_experts, top_k, 24, 20, torch.float32, CPU, renormalizes, is_clamped)
    x = draw(num_tokens, 24, dtype=torch.float32, device=CPU)
    logits = draw(num_tokens, num_experts, dtype=torch.float32, device=CPU)
    exact = mix_exactly(x, logits, experts)
    mix = TorchOps().mix_experts
    torch.testing.assert_close(mix(x, logits, experts, None).double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mix(x, logits, experts, x).double(), exact + x, atol=1e-5, rtol=1e-5)
    assert experts.loads is not None
    assert int(experts.loads.sum()) == 2 * num_tokens * top_k


def test_ranks_with_parts_of_the_experts_add_up() -> None:
    experts = make_experts(6, 3, 32, 16, torch.float32, CPU)
    x, logits = draw(9, 32, dtype=torch.float32, device=CPU), draw(9, 6, dtype=torch.float32, device=CPU)
    mix = TorchOps().mix_experts
    parts = [mix(x, logits, take_experts(experts, first, 2), None) for first in (0, 2, 4)]
    torch.testing.assert_close(sum(parts), mix(x, logits, experts, None), atol=1e-5, rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen() -> None:
    ids, shares = choose_experts(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), 3, True)
    assert ids.tolist() == [[1, 2, 0]]
    assert float(shares.sum()) == pytest.approx(1.0)


def test_no_tokens() -> None:
    experts = make_experts(4, 2, 16, 8, torch.float32, CPU)
    empty = torch.empty(0, 16)
    assert TorchOps().mix_experts(empty, empty[:, :4], experts, None).shape == (0, 16)


@pytest.mark.parametrize("is_clamped", [False, True])
def test_a_token_has_the_same_bits_alone(is_clamped: bool) -> None:
    experts = make_experts(6, 2, 40, 24, torch.float32, CPU, is_clamped=is_clamped)
    x, logits = draw(50, 40, dtype=torch.float32, device=CPU), draw(50, 6, dtype=torch.float32, device=CPU)
    mix = BlockedOps().mix_experts
    together = mix(x, logits, experts, x)
    for token in (0, 31):
        one = slice(token, token + 1)
        assert torch.equal(mix(x[one], logits[one], experts, x[one])[0], together[token])
