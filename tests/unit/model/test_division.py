"""Which numbers of tensor ranks a shape admits, and what it is of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import make_checkpoint
from toka_async.model.division import check_tensor_size, spec_of_rank, tensor_sizes
from toka_async.model.spec import ModelError, ModelSpec, read_spec


def shape(folder: Path, heads: int, kv_heads: int, inner: int) -> ModelSpec:
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner}
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
        part = spec_of_rank(spec, tp)
        assert part.num_heads * tp == heads
        assert part.intermediate_size * tp == inner
        assert part.num_kv_heads == max(1, kv_heads // tp)
        assert part.num_heads % part.num_kv_heads == 0
        assert part.vocab_size == spec.vocab_size


def test_other_sizes_are_refused_with_those_that_are_possible(tmp_path: Path) -> None:
    spec = shape(tmp_path, 6, 2, 72)
    with pytest.raises(ModelError, match=r"^parallel\.tp=3: .*6 heads, 2 KV heads.*use one of 1, 2, 6$"):
        check_tensor_size(spec, 3)
