from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cases.models import MXFP4, heads, make_checkpoint
from tests.drivers.thread_ranks import run_ranks
from toka_async.checkpoint.division import group_experts, stage_parts
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.model.attention import Attention
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.decoder import Decoder
from toka_async.model.dense_feed import DenseFeed
from toka_async.model.layers import HeadNorm, RMSNorm
from toka_async.model.matrices.mxfp4 import dequantize
from toka_async.model.weights import build_decoder, load_weights, random_weights

CPU = torch.device("cpu")


def decoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return build_decoder(read_spec(folder), dtype, CPU)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = decoder_of(folder, dtype)
    load_weights(decoder, folder)
    return decoder


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Sets tensors of a checkpoint (`__` for `.`), or removes them (None)."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral", "olmo2", "granite"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_in_its_place(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    stored = load_file(folder / "model.safetensors")
    parts = dict(load(folder).parts())
    assert set(parts) == set(stored)
    for name, part in parts.items():
        assert torch.equal(part.target, stored[name].expand_as(part.target)), name


@pytest.mark.parametrize("layout", ["published", "saved"])
@pytest.mark.parametrize(("family", "text"), [("mistral3", "mistral"), ("gemma3", "gemma3_text")])
def test_a_text_part_is_loaded_from_a_model_that_sees(tmp_path: Path, family: str, text: str, layout: str) -> None:
    """By the names of published checkpoints, and by those that transformers saves."""
    whole, alone = make_checkpoint(tmp_path / "whole", family), make_checkpoint(tmp_path / "alone", text)
    assert read_spec(whole) == read_spec(alone)
    if layout == "saved":
        names = {"language_model.model.": "model.language_model.", "language_model.": "", "vision": "model.vision"}
        stored = load_file(whole / "model.safetensors")
        for old, new in names.items():
            stored = {name.replace(old, new) if name.startswith(old) else name: each for name, each in stored.items()}
        save_file(stored, whole / "model.safetensors")
    for one, other in zip(load(whole).parameters(), load(alone).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_tensors_are_divided_by_their_parts(tmp_path: Path, rank: int) -> None:
    folder = make_checkpoint(tmp_path, "phi3", **heads(4, 2, 32, head_dim=8))
    stored = load_file(folder / "model.safetensors")
    place = SimpleNamespace(rank=rank, size=2)
    decoder = build_decoder(read_spec(folder), torch.float32, CPU, place)
    load_weights(decoder, folder)
    mixer = decoder.list_layers()[0].mixer
    assert isinstance(mixer, Attention)
    query, key, value = stored["model.layers.0.self_attn.qkv_proj.weight"].tensor_split([32, 48])
    expected = [part.chunk(2)[rank] for part in (query, key, value)]
    assert torch.equal(mixer.qkv.plain, torch.cat(expected))  # type: ignore[arg-type]
    gate, up = stored["model.layers.0.mlp.gate_up_proj.weight"].chunk(2)
    feed = decoder.list_layers()[0].feed
    assert isinstance(feed, DenseFeed)
    assert torch.equal(feed.gate_up.plain, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))  # type: ignore[arg-type]


def test_what_is_loaded_is_told(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    decoder, shown = decoder_of(folder), list[tuple[int, int, str]]()
    load_weights(decoder, folder, lambda *progress: shown.append(progress))
    assert len(shown) == len(dict(decoder.parts()))
    assert shown == sorted(shown)
    assert shown[-1] == (1, 1, "MiB loaded")


def test_every_parameter_is_filled(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", attention_bias=True)
    decoder = decoder_of(folder)
    for parameter in decoder.parameters():
        parameter.fill_(float("nan"))
    load_weights(decoder, folder)
    assert not any(parameter.isnan().any() for parameter in decoder.parameters())


def test_conversion(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", torch_dtype="bfloat16")
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert stored.dtype == torch.bfloat16
    for dtype in (torch.float32, torch.float16):
        decoder = load(folder, dtype)
        assert {parameter.dtype for parameter in decoder.parameters()} == {dtype}
        assert decoder.norm is not None
        assert torch.equal(decoder.norm.weight, stored.to(dtype))
    assert torch.get_default_dtype() == torch.float32


def test_harmless_extras(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    extras = {
        "lm_head__weight": torch.zeros(261, 48),
        "model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(4),
        "model__layers__2__mlp__up_proj__weight": torch.zeros(72, 48),  # of a layer that config.json leaves out
        "score__weight": torch.zeros(1, 48),
        "model__layers__1__self_attn__k_scale": torch.tensor(0.5),  # of the cache
        "model__layers__0__self_attn__v_proj__output_scale": torch.tensor([0.5]),
    }
    edit(folder, **extras)
    load(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers.1.self_attn.q_proj.bias", torch.zeros(48), r"\.q_proj\.bias has no place in the model"),
        ("layers.1.mlp.up_proj.weight", None, r"tensor .*\.up_proj\.weight of shape \[72, 48\] is missing"),
        ("layers.1.mlp.up_proj.weight", torch.zeros((72, 48), dtype=torch.int8), r"I8; supported: F64, F32, F16, BF16"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, name: str, value: Tensor | None, message: str) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    edit(folder, **{f"model.{name}": value})
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert f"model.{name}" in str(caught.value)


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    edit(folder, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight of shape \[261, 48\] is missing"):
        load(folder)
    edit(folder, model__layers__0__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"tensor lm_head.* is missing from the weights \(and 1 more tensors"):
        load(folder)


def test_a_tensor_of_the_wrong_shape(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    edit(folder, model__layers__1__self_attn__k_proj__weight=torch.zeros(24, 48))
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(caught.value) == (
        f"{folder}/model.safetensors: tensor model.layers.1.self_attn.k_proj.weight has shape [24, 48], "
        "but config.json asks for [16, 48]"
    )


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: is not a readable safetensors file .*download it again"):
        load(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors files; .* must be converted to safetensors"):
        load(folder)


def shard(folder: Path) -> dict[str, str]:
    """Splits a checkpoint in two files with an index; returns the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards(tmp_path: Path) -> None:
    whole = load(make_checkpoint(tmp_path / "whole", "qwen3"))
    folder = make_checkpoint(tmp_path / "shards", "qwen3")
    shard(folder)
    (folder / "consolidated.safetensors").write_bytes(b"another spelling of the same weights")
    sharded = load(folder)
    (folder / "consolidated.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    unindexed = load(folder)
    for one, two, three in zip(whole.parameters(), sharded.parameters(), unindexed.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors: no such file, though model\.safetensors\.index\.json names"):
        load(folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/a.safetensors", "b/../../a.safetensors", 3, None])
def test_an_index_leads_to_nothing_outside_of_its_folder(tmp_path: Path, name: object) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    (folder / "model.safetensors").rename(tmp_path / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(
        ModelError, match=r"index\.json: weight_map names .*: expected a file within the model's folder"
    ):
        load(folder)


def test_a_pipe_instead_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: is not a file"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_corrupt_index(tmp_path: Path, text: str) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load(folder)


def test_random_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", attention_bias=True)
    one, two, other = (decoder_of(folder) for _ in range(3))
    random_weights(one, seed=0)
    random_weights(two, seed=0)
    random_weights(other, seed=1)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    of_one, of_other = (decoder.embedding.weight for decoder in (one, other) if decoder.embedding is not None)
    assert not torch.equal(of_one, of_other)
    assert of_one.std().item() == pytest.approx(0.02, rel=0.05)
    norms = [module.weight for module in one.modules() if isinstance(module, (RMSNorm, HeadNorm))]
    assert len(norms) == 1 + 2 * 3
    assert all((weight == 1).all() for weight in norms)


class Rank(LocalComm):
    """One of several, which have nothing to say to each other while they are made."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "pp", "tp", "ep"),
    [("qwen3", 1, 2, 1), ("qwen3", 2, 1, 1), ("qwen3", 3, 2, 1), ("qwen3_moe", 2, 2, 1), ("qwen3_moe", 1, 2, 2)],
)
def test_random_weights_are_those_of_the_whole_model(
    tmp_path: Path, family: str, pp: int, tp: int, ep: int, tied: bool
) -> None:
    spec = read_spec(make_checkpoint(tmp_path, family, num_hidden_layers=5, tie_word_embeddings=tied))
    alone = build_decoder(spec, torch.bfloat16, CPU)
    spec = group_experts(spec, ep)
    random_weights(alone, seed=3)
    whole = {name: part.target for name, part in alone.parts()}
    seen = set()
    for stage in stage_parts(spec, pp, tp):
        for rank in range(tp):
            decoder = build_decoder(spec, torch.bfloat16, CPU, Rank(rank, tp), part=stage)
            random_weights(decoder, seed=3)
            for name, part in decoder.parts():
                seen.add(name)
                if "_norm." not in name:  # a row for each head, of which a rank has some
                    assert torch.equal(part.target, part.cut(whole[name]))
    assert seen == whole.keys()


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_loads_its_own_tensors(tmp_path: Path, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=5, tie_word_embeddings=tied)
    spec, stored = read_spec(folder), load_file(folder / "model.safetensors")
    of_stages = []
    for stage in stage_parts(spec, 3, 1):
        decoder = build_decoder(spec, torch.float32, CPU, part=stage)
        load_weights(decoder, folder)
        parts = dict(decoder.parts())
        assert {int(name.split(".")[2]) for name in parts if ".layers." in name} == {*range(stage.first, stage.last)}
        for name, part in parts.items():
            if "_norm." not in name:
                assert torch.equal(part.target, stored[name])
        of_stages.append({name for name in parts if ".layers." not in name})
    embedding = "model.embed_tokens.weight"
    assert of_stages == [{embedding}, set(), {"model.norm.weight", embedding if tied else "lm_head.weight"}]


def test_a_meta_decoder_has_shapes_only(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "qwen3"))
    decoder = build_decoder(spec, torch.bfloat16, torch.device("meta"))
    assert {parameter.device.type for parameter in decoder.parameters()} == {"meta"}
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: part.shape for name, part in decoder.parts()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }


@pytest.mark.parametrize(("num_groups", "quantize"), [(1, "none"), (2, "none"), (1, "fp8")])
def test_mxfp4_is_what_it_stands_for(tmp_path: Path, num_groups: int, quantize: str) -> None:
    """In ranks whose parts end within a group of values, with scales in another file; quantized again or not."""
    shape: dict[str, Any] = {"intermediate_size": 96, "num_hidden_layers": 1}
    packed = make_checkpoint(tmp_path / "packed", "gpt_oss", quantization_config=MXFP4, **shape)
    plain = make_checkpoint(tmp_path / "plain", "gpt_oss", torch_dtype="bfloat16", **shape)
    tensors = load_file(packed / "model.safetensors")
    exact = {name: value for name, value in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        pairs = zip(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], strict=True)
        exact[name] = torch.stack([dequantize(*pair).T for pair in pairs]).contiguous()
    save_file(exact, plain / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("down_proj_scales")}
    save_file(tensors, packed / "model.safetensors")
    files = {**dict.fromkeys(tensors, "model.safetensors"), **dict.fromkeys(scales, "other.safetensors")}
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file(scales, packed / "other.safetensors")

    def load_rank(folder: Path, comm: Comm) -> dict[str, Tensor]:
        decoder = build_decoder(group_experts(read_spec(folder, quantize), num_groups), torch.bfloat16, CPU, comm)
        load_weights(decoder, folder)
        return {name: parameter.float() for name, parameter in decoder.layers.named_parameters()}

    ranks = zip(*(run_ranks(2, partial(load_rank, folder)) for folder in (packed, plain)), strict=True)
    for ours, expected in ranks:
        assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []


def test_scales_of_mxfp4_may_not_be_missing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt_oss", quantization_config=MXFP4)
    edit(folder, model__layers__1__mlp__experts__down_proj_scales=None)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.down_proj_scales is missing"):
        load(folder)
