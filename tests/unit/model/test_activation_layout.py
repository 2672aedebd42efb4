from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.models import make_checkpoint
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.mean_attention import in_shards, load, run
from toka_async.checkpoint.spec import read_spec
from toka_async.model.activation_layout import LayoutPolicy, Replicated, SequenceSharded
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.matrices.ops import TorchOps
from toka_async.model.weights import build_decoder

BIASED = {"attention_bias": True, "mlp_bias": True}
KINDS: dict[str, dict[str, Any]] = {"llama": BIASED, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_shards_compute_what_one_rank_does(tmp_path: Path, kind: str, size: int) -> None:
    folder = make_checkpoint(tmp_path, kind, num_key_value_heads=size, **KINDS[kind])
    for num_tokens in (1, 2, 6, 7):
        for wanted in (None, torch.tensor([num_tokens - 1, 0])):
            alone = run(load(folder, LocalComm()), size, num_tokens, wanted)
            assert len(alone) == (num_tokens if wanted is None else 2)

            def of_rank(comm: Comm, num: int = num_tokens, wanted: torch.Tensor | None = wanted) -> torch.Tensor:
                return run(load(folder, comm, in_shards(comm)), num_tokens=num, wanted=wanted)

            for logits in run_ranks(size, of_rank):
                torch.testing.assert_close(logits, alone, atol=1e-9, rtol=1e-9)


def test_a_rank_norms_its_share_of_the_tokens(tmp_path: Path) -> None:
    """And the wanted ones where the others leave."""
    folder = make_checkpoint(tmp_path, "llama", num_key_value_heads=2, num_hidden_layers=2)

    def normed(comm: Comm, wanted: torch.Tensor | None) -> list[int]:
        rows: list[int] = []

        class CountingOps(TorchOps):
            def add_norm(self, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
                rows.append(len(x))
                return super().add_norm(x, *rest)

        decoder = build_decoder(
            read_spec(folder), torch.float64, torch.device("cpu"), comm, CountingOps(), in_shards(comm)
        )
        run(decoder, num_tokens=7, wanted=wanted)
        return rows

    assert run_ranks(2, partial(normed, wanted=None)) == [[4] * 5] * 2
    assert run_ranks(2, partial(normed, wanted=torch.tensor([6]))) == [[4, 4, 4, 1, 1]] * 2


def test_steps_of_enough_tokens_are_in_shards() -> None:
    whole, shards = Replicated(LocalComm()), SequenceSharded(LocalComm())
    assert [LayoutPolicy(whole, shards, 3).choose(num) is shards for num in (1, 2, 3, 4)] == [False, False, True, True]
    assert LayoutPolicy(whole).choose(10**6) is whole
