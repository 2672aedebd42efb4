"""Ranks and stages of a foreign model together equal one; what it computes is checked in tests/parity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cases.foreign_models import make_foreign
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.mean_attention import TOKENS, MeanAttention
from toka_async.checkpoint.division import StagePart, make_rank_spec
from toka_async.checkpoint.json_file import ModelError
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.matrices.ops import TorchOps
from toka_async.model.weights import load_weights, random_weights
from toka_async.transformers.build import build_foreign
from toka_async.transformers.decoder import ForeignDecoder
from toka_async.transformers.describe import describe

IDS, POSITIONS = torch.arange(TOKENS) * 37 % 261, torch.arange(TOKENS) + 3


def load(
    folder: Path, comm: Comm, part: StagePart | None = None, dtype: torch.dtype = torch.float32
) -> tuple[ForeignDecoder, int]:
    """A rank's part, and the number of its KV heads."""
    spec = describe(folder, trust_remote_code=False, tp=comm.size)
    cpu = torch.device("cpu")
    decoder = build_foreign(folder, False, spec, dtype, cpu, comm, TorchOps(), part)
    load_weights(decoder, folder)
    return decoder, make_rank_spec(spec, comm.size).attention.num_kv_heads


@torch.inference_mode()
def run(folder: Path, comm: Comm) -> tuple[Tensor, Tensor]:
    """All logits, and those of the rank's rows."""
    decoder, num_kv_heads = load(folder, comm)
    hidden = decoder.forward(IDS, POSITIONS, MeanAttention(num_kv_heads))
    return decoder.logits(hidden), decoder.own_logits(hidden[:6])


@pytest.mark.parametrize(
    "model_type",
    [
        *("starcoder2", "cohere", "gpt_neox", "nemotron", "qwen2_moe"),
        "olmo2",  # its plan leaves attention undivided
        "phi",  # its head has a bias, so each rank has all of it
    ],
)
def test_ranks_together_equal_one(tmp_path: Path, model_type: str) -> None:
    folder = make_foreign(tmp_path, model_type)
    alone, _ = run(folder, LocalComm())
    for rank, (logits, own) in enumerate(run_ranks(2, lambda comm: run(folder, comm))):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own, alone[3 * rank : 3 * rank + 3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["olmo", "gpt_neox", "phi"])
def test_types_of_16_bits_compute_the_same_less_exactly(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    """Embedding and head are ours, the layers the library's: both are of the model's type."""
    folder = make_foreign(tmp_path, model_type)
    exact, _ = run(folder, LocalComm())
    decoder, num_kv_heads = load(folder, LocalComm(), dtype=dtype)
    with torch.inference_mode():
        logits = decoder.logits(decoder.forward(IDS, POSITIONS, MeanAttention(num_kv_heads)))
    assert logits.dtype == dtype
    error = (logits.float() - exact).norm() / exact.norm()
    assert error < (0.03 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("model_type", ["starcoder2", "olmo", "gpt_neox", "phi"])
def test_stages_together_equal_one(tmp_path: Path, model_type: str) -> None:
    folder = make_foreign(tmp_path, model_type)
    alone, _ = run(folder, LocalComm())
    values = IDS
    with torch.inference_mode():
        for part in (StagePart(0, 1, 3), StagePart(1, 2, 3), StagePart(2, 3, 3)):
            decoder, num_kv_heads = load(folder, LocalComm(), part)
            assert (decoder.embedding is not None, decoder.head is not None) == (part.is_first, part.is_last)
            values = decoder.forward(values, POSITIONS, _Shifted(num_kv_heads, part.first))
    torch.testing.assert_close(decoder.logits(values), alone, atol=1e-4, rtol=1e-4)


class _Shifted(MeanAttention):
    """Of a stage whose first layer has this number."""

    def __init__(self, num_kv_heads: int, first: int) -> None:
        super().__init__(num_kv_heads)
        self.first = first

    def attend(self, layer: int, heads: Tensor, *others: object) -> Tensor:
        return super().attend(layer + self.first, heads, *others)  # type: ignore[arg-type]


def test_a_layer_holds_no_more_than_its_stage(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, "olmo")
    decoder, _ = load(folder, LocalComm(), StagePart(1, 2, 3))
    names = [name for name, _ in decoder.parts()]
    assert names
    assert all(name.startswith("model.layers.1.") for name in names)


def test_names_without_the_models_prefix_are_found(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, "gpt2")
    alone, _ = run(folder, LocalComm())
    tensors = load_file(folder / "model.safetensors")
    shorter = {name.removeprefix("transformer."): values for name, values in tensors.items()}
    shorter["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # the library ignores it
    save_file(shorter, folder / "model.safetensors")
    torch.testing.assert_close(run(folder, LocalComm())[0], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight of shape .* is missing"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.other.weight": torch.ones(1)}), "has no place"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 3)}), "has shape"),
    ],
)
def test_wrong_weights_are_refused(tmp_path: Path, change: object, error: str) -> None:
    folder = make_foreign(tmp_path, "olmo")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=error):
        load(folder, LocalComm())


def test_random_weights_fill_everything(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, "qwen2_moe")
    decoder, _ = load(folder, LocalComm())
    for values in decoder.parameters():
        values.fill_(torch.nan)
    random_weights(decoder, 0)
    assert all(bool(values.isfinite().all()) for values in decoder.parameters())
