from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from toka_async.attention.prefix_memory import MOST_PARTIALS, PrefixMemory, count_partials


def test_partial_results_stay_where_they_are() -> None:
    memory, query = PrefixMemory(torch.device("cpu"), 480, torch.bfloat16), torch.zeros(4, 6, 5)
    output = torch.empty_like(query)
    several, more = memory.take(query[:2], 3, output[:2]), memory.take(query, 4, output)
    assert several.output.data_ptr() == more.output.data_ptr()
    assert several.output.shape == (3, 2, 6, 5)
    assert more.lse.shape == (4, 4, 6)
    alone = memory.take(query, 1, output)
    assert alone.output.data_ptr() == output.data_ptr()
    assert (alone.output.shape, alone.lse.shape) == ((1, 4, 6, 5), (1, 4, 6))
    with pytest.raises(RuntimeError):
        memory.take(query, 5, output)


@pytest.mark.parametrize("gib", [16, 22, 24, 48, 80, 141])
def test_they_take_a_small_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    total = gib << 30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    taken = 4 * count_partials(torch.device("cuda"))
    assert total / 600 < taken <= total / 256
    assert taken <= 4 * MOST_PARTIALS
