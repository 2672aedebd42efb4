from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.models import make_checkpoint
from tests.drivers.gloo_ranks import LENGTHS, SIZES, answers_of_ranks, make_residuals
from tests.fakes.mean_attention import load, run
from toka_async.model.comm import LocalComm, join

Answers = dict[int, list[dict[str, Any]]]
SHAPE: dict[str, Any] = {"num_attention_heads": 12, "hidden_size": 48, "intermediate_size": 72, "head_dim": 6}
BIASED = {"attention_bias": True, "mlp_bias": True}
# The stand-in for attention is told one KV head, so every rank has one: alone, all of those that are not repeated.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BIASED),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
}


def kv_heads(size: int) -> tuple[int, ...]:
    """That leave each rank one, repeated or not."""
    return tuple(num for num in (1, 2, 3, 4) if size % num == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    checkpoints = {
        size: [
            make_checkpoint(folder / f"{kind}-{num}", family, num_key_value_heads=num, **SHAPE, **fields)
            for kind, (family, fields) in KINDS.items()
            for num in kv_heads(size)
        ]
        for size in SIZES
    }
    return answers_of_ranks(folder, checkpoints)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_exchange(answers: Answers, size: int) -> None:
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    parts = [own * (rank + 1) for rank in range(size)]
    for rank, answer in enumerate(answers[size]):
        assert answer["place"] == (rank, size)
        torch.testing.assert_close(answer["sum"], torch.stack(parts).sum(0))
        torch.testing.assert_close(answer["rows"], torch.cat(parts))
        torch.testing.assert_close(answer["columns"], torch.cat([part.T for part in parts], 1))
        sent = torch.tensor([[2 * rank + 100 * other, 2 * rank + 1 + 100 * other] for other in range(size)])
        assert torch.equal(answer["exchanged"], sent)
        summed = torch.arange(4.0 * size).view(-1, 2) * size * (size + 1) / 2
        torch.testing.assert_close(answer["scattered"], summed[2 * rank : 2 * rank + 2])
        assert answer["nothing"].shape == (0, 2 * size)
        assert answer["minimum"] == 11 - size
        assert answer["first"] == ["rank", 0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_split_model_computes_what_one_rank_does(answers: Answers, folder: Path, size: int, kind: str) -> None:
    """Steps whole on every rank, in shards of tokens, and in shards by torch's fused products."""
    for num in kv_heads(size):
        name = f"{kind}-{num}"
        alone = run(load(folder / name, LocalComm()), num)
        for way in ("whole", "shards", "overlapped"):
            of_ranks = [answer["models"][name][way] for answer in answers[size]]
            for logits in of_ranks:
                torch.testing.assert_close(logits, alone, atol=1e-9, rtol=1e-9)
                assert torch.equal(logits, of_ranks[0])  # ranks that see the same sample the same


@pytest.mark.parametrize("size", SIZES)
def test_ranks_have_all_logits_of_their_rows(answers: Answers, size: int) -> None:
    """The vocabulary's 261 ids are padded, the more the more ranks there are."""
    for name in answers[size][0]["models"]:
        for rank, answer in enumerate(answers[size]):
            own, every = answer["models"][name]["own"].split([12 // size, 12])
            torch.testing.assert_close(own, every[rank * len(own) : (rank + 1) * len(own)], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("rank", range(4))
def test_stages_send_each_other_what_they_should(answers: Answers, folder: Path, rank: int, num_nodes: int) -> None:
    """Equal ranks of two stages, in order, without mixing the two directions. Between machines, each sends its part."""
    assert answers
    received: list[torch.Tensor]
    received, sent = torch.load(folder / f"stage-{num_nodes}-{rank}")
    if rank < 2:  # float32, of 3 values a row; two ranks hold the same
        rows = [length if num_nodes == 1 else (length + 1) // 2 for length in LENGTHS]
        assert sent == {torch.float32: sum(rows) * 3 * 4}
    other = (rank + 2) % 4 if num_nodes == 1 else 1 - rank // 2
    for number, (length, tensor) in enumerate(zip(LENGTHS, received, strict=True)):
        if rank >= 2:
            expected = make_residuals(length, number, other)
        else:
            expected = torch.arange(length) + 10 * number + other
        assert torch.equal(tensor, expected)


def test_one_rank_starts_no_group() -> None:
    assert isinstance(join("", 0, 1, torch.device("cpu")), LocalComm)
