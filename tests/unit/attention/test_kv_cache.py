from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.models import make_checkpoint
from toka_async.attention.kv_cache import E4M3, CacheFormat, KVCache, LayerScales, bytes_per_token, make_caches
from toka_async.checkpoint.spec import read_spec


def filled_cache(stored: CacheFormat | None = None) -> KVCache:
    cache = KVCache(2, 5, 3, 4, 6, torch.float32, torch.device("cpu"), stored=stored)
    for layer in range(2):
        cache.keys[layer].copy_(torch.arange(5.0)[:, None, None, None] + 10 * layer)
        cache.values[layer].copy_(torch.arange(5.0)[:, None, None, None] + 100 + 10 * layer)
    return cache


def test_layout() -> None:
    cache = filled_cache()
    assert [tensor.shape for tensor in cache.keys + cache.values] == [(5, 3, 4, 6)] * 4


@pytest.mark.parametrize("stored", [None, CacheFormat(E4M3)], ids=["as computed", "e4m3"])
def test_copy_pages(stored: CacheFormat | None) -> None:
    cache = filled_cache(stored)
    cache.copy_pages(torch.tensor([0, 3]), torch.tensor([3, 1]))  # 3 is read before it is written
    for layer in range(2):
        keys, values = (torch.tensor([first + 10.0 * layer + page for page in (0, 3, 2, 0, 4)]) for first in (0, 100))
        assert torch.equal(cache.keys[layer][:, 0, 0, 0], keys.to(cache.keys[0].dtype))
        assert torch.equal(cache.values[layer][:, 2, 3, 5], values.to(cache.keys[0].dtype))


def test_scales() -> None:
    assert filled_cache().scales == (LayerScales(1, 1),) * 2
    scales = LayerScales(0.5, 2), LayerScales(3, 4)
    assert filled_cache(CacheFormat(E4M3, scales)).scales == scales
    with pytest.raises(AssertionError):
        filled_cache(CacheFormat(torch.float32, scales))


def test_scales_are_of_the_layers_that_keep_keys(tmp_path: Path) -> None:
    """Of a hybrid's layers, the second and the fourth have attention."""
    spec = read_spec(make_checkpoint(tmp_path, "qwen3_next"))
    scales = tuple(LayerScales(number, 10.0 + number) for number in range(4))
    (cache,) = make_caches(spec, 1, 1, torch.float32, torch.device("cpu"), stored=CacheFormat(E4M3, scales))
    assert [cache.scales[layer] for layer in range(2)] == [scales[1], scales[3]]


def test_bytes_per_token(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "llama", num_hidden_layers=3))
    cache = KVCache(3, 1, spec.attention.num_kv_heads, 1, spec.attention.head_dim, torch.bfloat16, torch.device("cpu"))
    total = sum(tensor.numel() * tensor.itemsize for tensor in cache.keys + cache.values)
    assert bytes_per_token(spec, torch.bfloat16) == total
    assert bytes_per_token(spec, torch.float32) == 2 * total
    assert 2 * bytes_per_token(spec, E4M3) == total
