"""What a rank answers to actions that cannot be carried out."""

from __future__ import annotations

import pytest
import torch

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.spec import read_spec
from toka_async.control import (
    BeginUpdate,
    Broadcast,
    CloseTransfer,
    Control,
    ControlDone,
    GroupTransfer,
    LoadTensors,
    NcclTransfer,
    OpenTransfer,
    RankAction,
    ReadTensor,
    VerifyUpdate,
)
from toka_async.model.weights import build_decoder, load_weights
from toka_async.weights.rank_control import RankControl


class Cache:
    """Does not sleep."""

    num_bytes = 70
    mapped_bytes = 72

    def release(self) -> None:
        raise AssertionError

    def restore(self) -> None:
        raise AssertionError


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> RankControl:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    spec = read_spec(folder)
    decoder = build_decoder(spec, torch.float32, torch.device("cpu"))
    load_weights(decoder, folder)
    return RankControl(
        decoder,
        lambda dtype: build_decoder(spec, dtype, torch.device("meta")),
        [Cache()],
        rank=1,
        number=3,
    )


def test_memory_that_torch_does_not_count(control: RankControl) -> None:
    assert control.count_mapped_bytes() == 72


def run(control: RankControl, action: RankAction) -> ControlDone:
    done = control.launch(Control(number=7, action=action))()
    assert (done.number, done.rank) == (7, 1)
    return done


GROUP = GroupTransfer(address="127.0.0.1", port=9, rank_offset=1, world_size=5, backend="gloo")


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (VerifyUpdate(), "no update has begun"),
        (LoadTensors(source=Broadcast(transfer="t"), seconds=1), "no update has begun"),
        (OpenTransfer(transfer=NcclTransfer(rank_offset=1, world_size=9), seconds=1), "NCCL needs ranks on GPUs"),
        (
            OpenTransfer(transfer=GroupTransfer(address="a", port=1, rank_offset=1, world_size=9), seconds=1),
            "backend=nccl needs ranks on GPUs; use gloo",
        ),
        (
            OpenTransfer(transfer=GroupTransfer(address="a", port=1, rank_offset=1, world_size=4), seconds=1),
            "rank_offset=1, world_size=4: a rank of the engine would be number 4",
        ),
        (OpenTransfer(transfer=GROUP, seconds=0.05), "rank 4 of 5 could not join"),
        (
            ReadTensor(name="model.layers.0.mlp.down_pro.weight", num_rows=1),
            "down_pro.weight: the model has no such tensor; did you mean model.layers.0.mlp.down_proj.weight?",
        ),
        (
            ReadTensor(name="model.layers.0.self_attn.qkv_proj.weight", num_rows=1),
            "it is a fused matrix; use self_attn.q_proj, self_attn.k_proj and self_attn.v_proj",
        ),
        (
            ReadTensor(name="model.layers.0.mlp.experts.gate_up_proj", num_rows=1),
            "experts.gate_up_proj: the model has no such tensor",
        ),
    ],
)
def test_what_cannot_be_done_is_explained(control: RankControl, action: RankAction, error: str) -> None:
    assert error in run(control, action).error


def test_tensors_need_an_open_transfer(control: RankControl) -> None:
    assert run(control, CloseTransfer(name="unknown")).error == ""
    assert run(control, BeginUpdate()).error == ""
    wanted = {"names": ("model.norm.weight",), "dtypes": ("float32",), "shapes": ((48,),)}
    load = LoadTensors(source=Broadcast(transfer="t"), seconds=1, **wanted)  # type: ignore[arg-type]
    assert run(control, load).error == "no transfer 't' is open"


@pytest.mark.parametrize("name", ["model.norm.weight", "model.language_model.norm.weight"])
def test_a_tensor_is_read_by_its_name_in_a_checkpoint(control: RankControl, name: str) -> None:
    done = run(control, ReadTensor(name=name, num_rows=3))
    assert done.error == ""
    assert [(each.shape, each.starts, each.sizes, each.values.nbytes) for each in done.rows] == [((3,), (0,), (3,), 12)]
