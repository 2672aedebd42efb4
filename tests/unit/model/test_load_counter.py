from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.cases.models import make_checkpoint
from tests.fakes.clock import Clock
from tests.fakes.mean_attention import load, run
from toka_async.model.comm import LocalComm
from toka_async.model.decoder import Decoder
from toka_async.model.experts_feed import ExpertsFeed
from toka_async.model.load_counter import INTERVAL, LoadCounter, make_load_counter

CPU = torch.device("cpu")


def build(folder: Path, family: str = "qwen3_moe", **fields: Any) -> Decoder:
    return load(make_checkpoint(folder, family, num_hidden_layers=3, **fields), LocalComm())


def test_counts_are_read_now_and_then(tmp_path: Path) -> None:
    decoder, clock = build(tmp_path), Clock()
    layer = decoder.list_layers()[2]
    assert isinstance(layer.feed, ExpertsFeed)
    counter = LoadCounter({2: layer.feed}, CPU, clock)

    def read() -> list[int] | None:
        reading = counter.take_due()
        if reading is None:
            return None
        assert reading.layers == (2,)
        (counts,) = reading.counts
        return [int(count) for count in counts]

    assert read() == [0] * 8
    run(decoder, 2, num_tokens=5)
    assert read() is None
    clock.now += INTERVAL
    counted = read()
    assert counted is not None
    assert sum(counted) == 3 * 5
    clock.now += INTERVAL
    assert read() == [0] * 8  # of nothing twice
    run(decoder, 2, num_tokens=5)
    counter.reset()
    clock.now += INTERVAL
    assert read() == [0] * 8
    run(decoder, 2, num_tokens=5)
    assert read() is None
    assert int(counter.take().counts[0].sum()) == 3 * 5  # however short it is ago


def test_feeds_know_how_many_tokens_count(tmp_path: Path) -> None:
    decoder = build(tmp_path, mlp_only_layers=[1])
    counter = make_load_counter(decoder, CPU)
    assert counter is not None
    feeds = [layer.feed for layer in decoder.list_layers() if isinstance(layer.feed, ExpertsFeed)]
    assert len(feeds) == 2
    for num_tokens in (7, 7, 3):
        counter.begin(num_tokens)
        assert [feed.weights.counted for feed in feeds] == [torch.tensor([num_tokens], dtype=torch.int32)] * 2
    reading = counter.take_due()
    assert reading is not None
    assert reading.layers == (0, 2)


def test_without_experts_nothing_is_counted(tmp_path: Path) -> None:
    assert make_load_counter(build(tmp_path, "qwen3"), CPU) is None
