from __future__ import annotations

from pathlib import Path

import torch

from tests.cases.models import make_checkpoint
from toka_async.attention.kv_cache import KVCache, bytes_per_token
from toka_async.checkpoint.spec import read_spec


def filled_cache() -> KVCache:
    cache = KVCache(2, 5, 3, 4, 6, torch.float32, torch.device("cpu"))
    for layer in range(2):
        cache.keys[layer].copy_(torch.arange(5.0)[:, None, None, None] + 10 * layer)
        cache.values[layer].copy_(torch.arange(5.0)[:, None, None, None] + 100 + 10 * layer)
    return cache


def test_layout() -> None:
    cache = filled_cache()
    assert [tensor.shape for tensor in cache.keys + cache.values] == [(5, 3, 4, 6)] * 4


def test_copy_pages() -> None:
    cache = filled_cache()
    cache.copy_pages(torch.tensor([0, 3]), torch.tensor([3, 1]))  # 3 is read before it is written
    for layer in range(2):
        assert cache.keys[layer][:, 0, 0, 0].tolist() == [10 * layer + page for page in (0, 3, 2, 0, 4)]
        assert cache.values[layer][:, 2, 3, 5].tolist() == [100 + 10 * layer + page for page in (0, 3, 2, 0, 4)]


def test_bytes_per_token(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "llama", num_hidden_layers=3))
    cache = KVCache(3, 1, spec.num_kv_heads, 1, spec.head_dim, torch.bfloat16, torch.device("cpu"))
    total = sum(tensor.numel() * tensor.itemsize for tensor in cache.keys + cache.values)
    assert bytes_per_token(spec, torch.bfloat16) == total
    assert bytes_per_token(spec, torch.float32) == 2 * total
