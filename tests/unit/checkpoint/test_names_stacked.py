from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.names import list_stored_parts
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.model.decoder import Decoder
from toka_async.model.weights import build_decoder, load_weights
from toka_async.transfer.tensors import TensorInfo
from toka_async.weights.catalog import UpdateError, WeightCatalog
from toka_async.weights.update import WeightUpdate

CPU = torch.device("cpu")
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "apart", "qwen3_5_moe_text", num_hidden_layers=2)


def load(folder: Path) -> Decoder:
    decoder = build_decoder(read_spec(folder), torch.float32, CPU)
    load_weights(decoder, folder)
    return decoder


def stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with all experts of a layer in one, as a part of a larger model."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{number}.{name}_proj.weight"] for number in range(6)])
            for name in ("gate", "up", "down")
        )
        stacked |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stacked.items()}


def test_experts_in_one_tensor_are_read_as_each_of_them(folder: Path, tmp_path: Path) -> None:
    together = make_checkpoint(tmp_path / "together", "qwen3_5_moe_text", num_hidden_layers=2)
    save_file(stack(load_file(folder / "model.safetensors")), together / "model.safetensors")
    for one, other in zip(load(folder).parameters(), load(together).parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_trainer_may_send_them_so(folder: Path) -> None:
    decoder, exact = load(folder), load(folder)
    for parameter in decoder.parameters():
        parameter.zero_()
    update = WeightUpdate(
        decoder,
        dict(decoder.parts()),
        WeightCatalog(build_decoder(read_spec(folder), torch.float32, torch.device("meta"))),
    )
    tensors = stack(load_file(folder / "model.safetensors"))
    update.check([TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    update.write(tensors.items())
    update.finish(partial=False)
    for one, other in zip(decoder.parameters(), exact.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_wrong_number_of_experts_is_refused(folder: Path) -> None:
    catalog = WeightCatalog(build_decoder(read_spec(folder), torch.float32, torch.device("meta")))
    with pytest.raises(UpdateError, match="gate_up_proj: the model has no such tensor"):
        catalog.check([TensorInfo(f"{EXPERTS}.gate_up_proj", torch.float32, (7, 40, 48))], ())
    with pytest.raises(UpdateError, match=r"gate_up_proj has shape \[21, 48\]"):
        catalog.check([TensorInfo(f"{EXPERTS}.gate_up_proj", torch.float32, (6, 42, 48))], ())


def test_a_name_that_the_model_has_is_its_own() -> None:
    name = f"{EXPERTS}.gate_up_proj"
    assert [part.name for part in list_stored_parts(name, (2, 4, 3), {name})] == [name]
    parts = list_stored_parts(name, (2, 4, 3), ())
    assert [part.name.rpartition("experts.")[2] for part in parts] == [
        "0.gate_proj.weight", "0.up_proj.weight", "1.gate_proj.weight", "1.up_proj.weight",
    ]  # fmt: skip
    tensor = torch.arange(24).view(2, 4, 3)
    assert torch.equal(torch.stack([part.view(tensor) for part in parts]).view(2, 4, 3), tensor)


def test_tensors_of_images_are_left_out(tmp_path: Path) -> None:
    load(make_checkpoint(tmp_path / "whole", "qwen3_5"))
    folder = make_checkpoint(tmp_path / "broken", "qwen3_5")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.language_model.layers.0.linear_attn.more.weight"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.layers.0.linear_attn.more.weight has no place"):
        load(folder)
