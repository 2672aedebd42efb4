from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.models import GEMMA4_SMALL, heads, make_checkpoint
from toka_async.checkpoint.division import (
    all_layers,
    check_division,
    check_tensor_size,
    group_experts,
    make_rank_spec,
    make_stage_spec,
    stage_layers,
    stage_parts,
    tensor_sizes,
)
from toka_async.checkpoint.layer_spec import DenseFeedSpec
from toka_async.checkpoint.spec import ModelError, ModelSpec, read_spec


def shape(folder: Path, num_heads: int, kv_heads: int, inner: int) -> ModelSpec:
    fields = {"num_attention_heads": num_heads, "num_key_value_heads": kv_heads, "intermediate_size": inner}
    return read_spec(make_checkpoint(folder, "llama", head_dim=8, **fields))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "sizes"),
    [
        (6, 2, 72, [1, 2, 6]),  # 3 neither divides 2 KV heads nor is divided by them
        (8, 8, 64, [1, 2, 4, 8]),
        (8, 1, 64, [1, 2, 4, 8]),
        (8, 2, 20, [1, 2, 4]),  # 8 does not divide 20
        (14, 2, 28, [1, 2, 14]),
    ],
)
def test_sizes_divide_heads_and_repeat_kv_heads(
    tmp_path: Path, heads: int, kv_heads: int, inner: int, sizes: list[int]
) -> None:
    spec = shape(tmp_path, heads, kv_heads, inner)
    assert tensor_sizes(spec) == sizes
    for tp in sizes:
        check_tensor_size(spec, tp)
        part = make_rank_spec(spec, tp)
        assert part.attention.num_heads * tp == heads
        feeds = [layer.feed for layer in part.layers]
        assert [feed.inner * tp for feed in feeds if isinstance(feed, DenseFeedSpec)] == [inner] * spec.num_layers
        assert part.attention.num_kv_heads == max(1, kv_heads // tp)
        assert part.attention.num_heads % part.attention.num_kv_heads == 0
        assert part.vocab_size == spec.vocab_size


def test_other_sizes_are_refused_with_those_that_are_possible(tmp_path: Path) -> None:
    spec = shape(tmp_path, 6, 2, 72)
    with pytest.raises(ModelError, match=r"^parallel\.tp=3: .*6 heads, 2 KV heads.*use one of 1, 2, 6$"):
        check_tensor_size(spec, 3)


def experts(folder: Path, num_experts: int, inner: int, ep: int) -> ModelSpec:
    fields = heads(12, 12, 48, head_dim=4, num_experts=num_experts, moe_intermediate_size=inner)
    return group_experts(read_spec(make_checkpoint(folder, "qwen3_moe", **fields)), ep)


@pytest.mark.parametrize(
    ("num_experts", "inner", "ep", "sizes"),
    [
        (8, 6, 1, [1, 2, 3, 6]),  # a part of each expert's units
        (8, 5, 2, [2]),
        (8, 6, 2, [2, 4, 6, 12]),  # half of the experts, and a part of their units
        (8, 5, 4, [4]),
        (9, 4, 3, [3, 6, 12]),
    ],
)
def test_experts_are_divided_by_number_and_by_units(
    tmp_path: Path, num_experts: int, inner: int, ep: int, sizes: list[int]
) -> None:
    spec = experts(tmp_path, num_experts, inner, ep)
    assert tensor_sizes(spec) == sizes
    for tp in sizes:
        for matrix, whole in zip(make_rank_spec(spec, tp).list_matrices(0)[3:], spec.list_matrices(0)[3:], strict=True):
            assert tp * matrix.count_bytes(2) == whole.count_bytes(2)


def test_groups_of_experts_that_are_impossible(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^parallel\.ep=2: the model has no experts; use 1$"):
        group_experts(shape(tmp_path, 6, 2, 72), 2)
    possible = r"use one of 1 \(parallel\.ep=1\), 2 \(parallel\.ep=1 or 2\), .*, 12 \(parallel\.ep=2 or 4\)$"
    with pytest.raises(ModelError, match=rf"^parallel\.tp=3: .* 8 experts in parallel\.ep=2 groups .*; {possible}"):
        check_tensor_size(experts(tmp_path, 8, 6, 2), 3)
    with pytest.raises(ModelError, match=rf"parallel\.ep=5 groups .*; {possible}"):
        check_tensor_size(experts(tmp_path, 8, 6, 5), 5)


@given(st.integers(1, 100), st.data())
def test_stages_are_balanced(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    layer, ends = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 30))
    counts = stage_layers([layer] * num_layers, num_stages, ends)
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    weights = [count * layer + ends * ((stage == 0) + (stage == num_stages - 1)) for stage, count in enumerate(counts)]
    for stage, weight in enumerate(weights):  # no layer would be better off elsewhere
        assert counts[stage] == 1 or all(weight - layer <= other for other in weights)


def test_stages_of_layers_that_differ() -> None:
    assert stage_layers([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], 2, 0) == [1, 9]
    assert stage_layers([1, 1, 1, 9, 9, 1], 3, 0) == [3, 1, 2]
    assert stage_layers([4, 4, 4, 1], 2, 4) == [2, 2]
    assert stage_layers([3, 3, 3, 3, 3], 3, 0) == [2, 2, 1]


def test_parts_of_stages_follow_each_other(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 7, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}
    spec = read_spec(make_checkpoint(tmp_path, "qwen2", **fields))
    for pp in range(1, 8):
        check_division(spec, pp, 1)
        parts = stage_parts(spec, pp, 1)
        assert [parts[0].first, *(part.last for part in parts)] == [*(part.first for part in parts), 7]
        assert [part.is_first for part in parts] == [True, *[False] * (pp - 1)]
        assert [part.is_last for part in parts] == [*[False] * (pp - 1), True]
        of_stages = [make_stage_spec(spec, part) for part in parts]
        assert [part.size for part in parts] == [stage.num_layers for stage in of_stages]
        assert sum((stage.windows for stage in of_stages), ()) == spec.windows == (0, 0, 0, 0, 64, 64, 64)
    assert stage_parts(spec, 1, 1) == [all_layers(spec)]
    with pytest.raises(ModelError, match=r"^parallel\.pp=8: the model has 7 layers; use at most 7$"):
        check_division(spec, 8, 1)


def test_layers_that_read_the_keys_of_others_are_in_their_stage(tmp_path: Path) -> None:
    """The last three of six read those of the second and the third."""
    spec = read_spec(make_checkpoint(tmp_path, "gemma4_text", **GEMMA4_SMALL))
    assert [each.reads_back for each in spec.all_attentions] == [0, 0, 0, 2, 3, 3]
    assert [(part.first, part.last) for part in stage_parts(spec, 2, 1)] == [(0, 1), (1, 6)]
    check_division(spec, 2, 1)
    message = (
        r"^parallel\.pp=3: the model has 6 layers, and those from 1 to 5 read each other's keys, .*; use at most 2$"
    )
    with pytest.raises(ModelError, match=message):
        check_division(spec, 3, 1)


def test_blocks_of_scales_are_not_cut(tmp_path: Path) -> None:
    """Two ranks have 128 inputs and outputs of everything, four have fewer."""
    fields = heads(4, 4, 128, head_dim=64, intermediate_size=256)
    spec = read_spec(make_checkpoint(tmp_path, "llama", **fields), "fp8_block")
    assert tensor_sizes(spec) == [1, 2]
    check_tensor_size(spec, 2)
    with pytest.raises(ModelError, match=r"^parallel\.tp=4: .*so into whole blocks of scales; use one of 1, 2$"):
        check_tensor_size(spec, 4)
    assert tensor_sizes(read_spec(tmp_path, "fp8")) == [1, 2, 4]


def test_a_model_without_whole_blocks(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "llama"), "fp8_block")
    with pytest.raises(ModelError, match=r"^self_attn\.q_proj, .* no multiple of 128.*; use scales .*quantize=fp8\)$"):
        check_tensor_size(spec, 1)
    formats = {layer.format for layer in spec.layers}
    published = [msgspec.structs.replace(layer, format="fp8/block/weight_scale_inv") for layer in spec.layers]
    assert formats == {"fp8/block"}
    with pytest.raises(
        ModelError, match=r"no multiple of 128.*; use the checkpoint in bfloat16 with scales by channel"
    ):
        check_tensor_size(msgspec.structs.replace(spec, layers=tuple(published)), 1)
