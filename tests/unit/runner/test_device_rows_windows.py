"""Layers with a window in captured steps: their page table stays where it is, and graphs read what is there then.

CUDA's part of graphs is played on the CPU, and our kernels run in Triton's interpreter.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.cases.models import make_checkpoint
from tests.drivers.core import CoreDriver
from tests.drivers.page_rank import submit
from tests.fakes.graphs import FakeGraphs
from toka_async.attention.build import BuiltAttention
from toka_async.attention.kv_cache import make_caches
from toka_async.attention.layered.backend import LayeredCache, join_attention
from toka_async.attention.reference import ReferenceAttention
from toka_async.checkpoint.spec import read_spec
from toka_async.messages import Ready, TokenSampling
from toka_async.model.weights import build_decoder, load_weights
from toka_async.runner.device_rows import DeviceRows
from toka_async.runner.runner import Runner, SamplingSetup

CPU = torch.device("cpu")
READY = Ready(
    num_pages=60,
    page_size=2,
    max_seqs=4,
    max_context=60,
    vocab_size=261,
    max_tokens=16,
    num_window_pages=20,
    window=5,
)
PROMPTS = [[*range(40, 51)], [7, 8, 9]]


def make_runner(folder: Path, with_graphs: bool) -> Runner:
    spec = read_spec(folder)
    decoder = build_decoder(spec, torch.float32, CPU)
    load_weights(decoder, folder)
    num_pages, num_window_pages = READY.num_pages + 1, READY.num_window_pages + 1
    caches = make_caches(spec, num_pages, READY.page_size, torch.float32, CPU, num_window_pages=num_window_pages)
    parts = []
    for (kind, layers), cache in zip(spec.attention_kinds.items(), caches, strict=True):
        windows = [spec.windows[layer] for layer in layers]
        parts.append(BuiltAttention(ReferenceAttention(cache, kind.num_heads, windows)))
        if with_graphs:
            from toka_async.attention.mixed import MixedGraphAttention
            from toka_async.attention.paged import PagedAttention
            from toka_async.attention.triton import TritonChunks, TritonDecode

            decode, chunks = partial(TritonDecode, cache, kind.num_heads), partial(TritonChunks, cache, kind.num_heads)
            paged = PagedAttention(cache, kind.num_heads, windows, decode, chunks)
            parts[-1] = BuiltAttention(
                paged, paged, mixed=MixedGraphAttention(cache, kind.num_heads, windows, decode, chunks)
            )
    attention = join_attention(parts, list(spec.attention_kinds.values()), [cache.of_windows for cache in caches])
    return Runner(READY, CPU, decoder, LayeredCache(caches), attention, SamplingSetup(kernels=with_graphs))


def run(runner: Runner) -> list[tuple[list[int], list[float]]]:
    driver = CoreDriver(READY, max_tokens=READY.max_tokens, rank=runner, group_min_seqs=2, group_min_tokens=2)
    sampling = TokenSampling(temperature=0, num_logprobs=0)
    fields = {"sampling": sampling, "max_tokens": 9}
    received = [driver.submit(submit(i, prompt, n=2 - i, **fields)) for i, prompt in enumerate(PROMPTS)]
    driver.drain()
    driver.core.check()
    return [(sample.token_ids, sample.logprobs) for each in received for sample in each.samples]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that are interpreted need a machine without a GPU")
@pytest.mark.parametrize("num_layers", [1, 2])
def test_graphs_follow_the_window_pages(tmp_path: Path, fake_graphs: FakeGraphs, num_layers: int) -> None:
    """A layer with a window alone, and with one that sees all."""
    kinds = ["sliding_attention", "full_attention"][:num_layers]
    folder = make_checkpoint(
        tmp_path, "ministral", num_hidden_layers=num_layers, sliding_window=READY.window, layer_types=kinds
    )
    replaying = make_runner(folder, with_graphs=True)
    assert replaying.decode is not None
    assert replaying.mixed is not None
    list(replaying.decode.capture([1, 4], 1))
    list(replaying.mixed.capture([16], grouped=True))
    for (tokens, logprobs), (other, others) in zip(run(replaying), run(make_runner(folder, False)), strict=True):
        assert tokens == other
        np.testing.assert_allclose(logprobs, others, atol=1e-4)
    assert fake_graphs.num_replays("mixed") > 0


def test_rows_that_share_a_page_have_the_same_window_page() -> None:
    rows = DeviceRows(3, 4, 8, 10, CPU, num_window_pages=6)
    rows.set_windows(np.asarray([[2, 5], [7, 1]], np.int32))
    rows.set_pages(torch.tensor([0, 1, 8, 9]), torch.tensor([2, 7, 2, 3]))
    assert rows.window_table[:2, :2].tolist() == [[5, 1], [5, 3]]
    rows.set_windows(np.asarray([[2, 0]], np.int32))
    rows.renew_windows(0, 1)
    assert rows.window_table[:2, :2].tolist() == [[0, 1], [0, 3]]
    rows.renew_windows(0, 20)
    assert rows.window_table.shape == rows.page_table.shape == (4, 32)
    assert bool((rows.window_table[rows.padding] == 6).all())
    windows = rows.describe_windows(torch.tensor([2 * 4 + 3, 7 * 4]))
    assert windows is not None
    assert windows.write_indices.tolist() == [0 * 4 + 3, 1 * 4]
    assert windows.page_table is rows.window_table
