from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases.models import make_checkpoint
from toka_async.attention.kv_cache import E4M3, CacheFormat, bytes_per_token, make_cache
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.layer_spec import DenseFeedSpec, LayerSpec
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import ModelError, ModelSpec, read_spec
from toka_async.config import CacheConfig, GraphsConfig, ScheduleConfig
from toka_async.model.weights import build_decoder
from toka_async.runner.graphs import list_graph_sizes
from toka_async.runner.mixed import list_mixed_sizes
from toka_async.runner.token_history import TokenHistory
from toka_async.startup.cache_size import (
    MemoryShares,
    check_largest_step,
    choose_shares,
    compute_cache_memory,
    count_graph_bytes,
    count_graph_rows,
    count_graph_tokens,
    count_largest_step_pages,
    count_page_bytes,
    count_row_bytes,
    count_token_bytes,
    fit_limits,
)

GIB = 1 << 30
GPU = torch.device("cuda")
ALL = MemoryShares()


@dataclass(slots=True)
class Memory:
    """Of a GPU, in bytes."""

    total: int = 80 * GIB
    free: int = 80 * GIB
    reserved: int = 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory.free, memory.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: memory.reserved)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory.total))
    return memory


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=1 << 20))


def layers_of(attention: AttentionSpec, inner: int, num_layers: int) -> tuple[LayerSpec, ...]:
    return (LayerSpec(attention, DenseFeedSpec(inner, "silu", bias=False)),) * num_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_a_page_takes_what_cache_and_history_allocate(
    spec: ModelSpec, dtype: torch.dtype, page_size: int, kind: Literal["auto", "fp8"]
) -> None:
    cpu, stored = torch.device("cpu"), CacheFormat(E4M3) if kind == "fp8" else None
    cache = make_cache(spec, 7, page_size, dtype, cpu, stored=stored)
    tensors = [*cache.keys, *cache.values, TokenHistory(7, page_size, cpu).ids]
    allocated = sum(tensor.nbytes for tensor in tensors)
    assert 7 * count_page_bytes(spec, CacheConfig(page_size=page_size, dtype=kind), dtype).page == allocated


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9), page_size=st.sampled_from([1, 2, 5, 16, 64]))
def test_the_largest_step_and_a_token_more_of_each_fit(lengths: list[int], page_size: int) -> None:
    num_pages = count_largest_step_pages(RankLimits(len(lengths), sum(lengths), 1000), page_size)
    assert sum(-(-(length + 1) // page_size) for length in lengths) <= num_pages


def test_the_cache_gets_what_is_left(memory: Memory) -> None:
    """Of 0.9 * 80 GiB, others use 5; this process has reserved 20, of which a step needs 12 at its peak."""
    memory.free, memory.reserved = 80 * GIB - 25 * GIB, 20 * GIB
    spare = int(0.02 * memory.total) + GIB
    assert compute_cache_memory(GPU, 0.9, 12 * GIB) == pytest.approx(72 * GIB - 5 * GIB - 12 * GIB - spare, abs=2)
    assert compute_cache_memory(GPU, 0.9, 70 * GIB) < 0
    # What torch keeps without using it makes no difference.
    memory.free, memory.reserved = memory.free + 3 * GIB, memory.reserved - 3 * GIB
    assert compute_cache_memory(GPU, 0.9, 12 * GIB) == pytest.approx(72 * GIB - 5 * GIB - 12 * GIB - spare, abs=2)


def test_graphs_take_what_is_counted_for_them(spec: ModelSpec) -> None:
    """All activations of a layer's widest moment, and logits; keys and values lie in the cache."""
    dtype = torch.bfloat16
    assert count_graph_bytes(spec, dtype, 0, 0) == 0
    a_row = count_graph_bytes(spec, dtype, 1, 0)
    assert count_graph_bytes(spec, dtype, 512, 0) == 512 * a_row
    assert count_graph_bytes(spec, dtype, 512, 100) == 512 * a_row + 100 * (a_row - 2 * spec.vocab_size)
    decoder = build_decoder(spec, dtype, torch.device("cpu"))
    hidden = torch.zeros(3, spec.hidden_size, dtype=dtype)
    (gate_up,) = {weight.shape[0] for name, weight in decoder.named_parameters() if name.endswith("gate_up.weight")}
    gated = 3 * (gate_up + gate_up // 2) * dtype.itemsize
    assert 3 * a_row >= gated + 2 * hidden.nbytes + decoder.logits(hidden).nbytes


@pytest.mark.parametrize("gib", [16, 22, 24, 48, 80, 141])
@pytest.mark.parametrize("size", ["1b", "8b"])
def test_nothing_is_taken_after_the_cache_that_was_not_left_for_it(
    memory: Memory, spec: ModelSpec, gib: int, size: str
) -> None:
    """What is not in the peak of the largest step: graphs' own memory and nodes, libraries' workspaces, waste."""
    hidden, inner, layers, heads, rows = {"1b": (2048, 8192, 16, 32, 2048), "8b": (4096, 14_336, 32, 32, 512)}[size]
    attention = AttentionSpec(num_heads=heads, num_kv_heads=8, head_dim=hidden // heads, rope=None)
    spec = msgspec.structs.replace(
        spec, hidden_size=hidden, layers=layers_of(attention, inner, layers), vocab_size=128_256
    )
    total = memory.total = gib * GIB
    weights = layers * (3 * inner * hidden + 3 * hidden * hidden) * 2 + 128_256 * hidden * 2
    peak = weights + 2 * GIB
    memory.reserved, memory.free = peak + GIB, total - peak - GIB - GIB // 2  # and half for CUDA itself
    tokens = count_graph_tokens(GraphsConfig(), spec, torch.bfloat16, total, 32768)
    of_graphs = count_graph_bytes(spec, torch.bfloat16, rows, tokens)
    cache = compute_cache_memory(GPU, 0.9, peak) - of_graphs
    if cache <= 0:
        return  # the start refuses
    nodes = (2 * len(list_graph_sizes(rows)) + len(list_mixed_sizes(tokens))) * layers * 16 * 2048
    workspaces = 4 * (32 << 20)
    assert peak + GIB // 2 + cache + of_graphs + nodes + workspaces <= 0.9 * total


def test_limits_that_fit(memory: Memory, spec: ModelSpec) -> None:
    check_largest_step(
        spec, RankLimits(256, 4096, 2048), torch.bfloat16, CacheConfig(memory_fraction=0.9), GPU, MemoryShares()
    )
    memory.total = memory.free = 1 * GIB  # a small model in a small GPU
    check_largest_step(
        spec, RankLimits(8, 64, 512), torch.bfloat16, CacheConfig(memory_fraction=0.9), GPU, MemoryShares()
    )


def advised(message: str, limits: RankLimits) -> RankLimits:
    """The limits with what the message says to use."""
    names = re.findall(r"schedule\.(max_\w+)=(\d+)", message.partition(": ")[0])
    values = re.search(r"use at most (\d+)(?: and (\d+))?$", message)
    assert values is not None, message
    new = {name: int(value) for (name, _), value in zip(names, filter(None, values.groups()), strict=True)}
    assert all(getattr(limits, name) == int(value) > new[name] for name, value in names), message
    return RankLimits(
        **{"max_seqs": limits.max_seqs, "max_tokens": limits.max_tokens} | new, max_context=limits.max_context
    )


@pytest.mark.parametrize(
    ("limits", "gib", "names"),
    [
        (RankLimits(100_000, 100_000, 1 << 20), 20, ["max_seqs"]),
        (RankLimits(16, 10_000_000, 1000), 12, ["max_tokens"]),
        (RankLimits(1_000_000, 100_000_000, 1 << 20), 30, ["max_seqs", "max_tokens"]),
        (RankLimits(4_000_000, 5_000_000, 1000), 6, ["max_seqs", "max_tokens"]),
    ],
)
def test_limits_that_do_not_fit(
    memory: Memory, spec: ModelSpec, limits: RankLimits, gib: int, names: list[str]
) -> None:
    memory.free = memory.total = gib * GIB
    with pytest.raises(ModelError, match=r"^schedule\.max_.*MiB are free; use at most \d+") as raised:
        check_largest_step(spec, limits, torch.bfloat16, CacheConfig(memory_fraction=1.0), GPU, ALL)
    new = advised(str(raised.value), limits)
    assert [name for name in ("max_seqs", "max_tokens") if getattr(new, name) != getattr(limits, name)] == names
    assert new.max_tokens >= new.max_seqs >= 1
    check_largest_step(spec, new, torch.bfloat16, CacheConfig(memory_fraction=1.0), GPU, ALL)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seqs=st.integers(1, 10**6), more=st.integers(0, 10**7), context=st.integers(1, 10**6), mib=st.integers(1, 10**5))
def test_what_is_advised_fits(memory: Memory, spec: ModelSpec, seqs: int, more: int, context: int, mib: int) -> None:
    memory.total = memory.free = mib << 20
    limits = RankLimits(seqs, seqs + more, context)
    message = refusal(spec, limits)
    if message and not message.endswith("use a smaller model, or raise cache.memory_fraction"):
        new = advised(message, limits)
        assert new.max_tokens >= new.max_seqs >= 1
        assert not refusal(spec, new)


def refusal(spec: ModelSpec, limits: RankLimits) -> str:
    try:
        check_largest_step(spec, limits, torch.float32, CacheConfig(memory_fraction=0.8), GPU, ALL)
    except ModelError as error:
        return str(error)
    return ""


def test_no_memory_at_all(memory: Memory, spec: ModelSpec) -> None:
    memory.free = GIB
    message = (
        r"^schedule.max_seqs=4, schedule.max_tokens=4: .* where 0 MiB are free; use a smaller model, or raise cache"
    )
    with pytest.raises(ModelError, match=message):
        check_largest_step(
            spec, RankLimits(4, 4, 10), torch.bfloat16, CacheConfig(memory_fraction=0.5), GPU, MemoryShares()
        )


def test_rows_and_tokens_take_more_of_a_larger_vocabulary_and_model(tmp_path: Path, spec: ModelSpec) -> None:
    wide = read_spec(make_checkpoint(tmp_path / "wide", "llama", hidden_size=96, vocab_size=1000))
    limits, dtype = RankLimits(4, 8, 4096), torch.bfloat16
    assert (
        count_row_bytes(wide, limits, dtype, 16) - count_row_bytes(spec, limits, dtype, 16)
        == 739 * 2 + 1000 // 4 - 261 // 4
    )
    assert count_token_bytes(wide, dtype) - count_token_bytes(spec, dtype) == 4 * 48 * 2
    assert count_token_bytes(spec, torch.float32) == 2 * count_token_bytes(spec, dtype)
    stored = bytes_per_token(spec, E4M3)
    assert count_token_bytes(spec, dtype) - count_token_bytes(spec, dtype, stored=E4M3) == stored


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [(ScheduleConfig(), (2, 16)), (ScheduleConfig(max_seqs=16), (16, 16)), (ScheduleConfig(max_tokens=32), None)],
)
def test_automatic_limits_become_smaller_until_they_fit(
    schedule: ScheduleConfig, expected: tuple[int, int] | None
) -> None:
    def check(limits: RankLimits) -> None:
        if limits.max_tokens > 16 or (limits.max_seqs > 2 and schedule.max_seqs == "auto"):
            raise ModelError("too much")

    limits = RankLimits(16 if schedule.max_seqs == 16 else 32, 128 if schedule.max_tokens == "auto" else 32, 100)
    if expected is None:
        with pytest.raises(ModelError, match="too much"):
            fit_limits(limits, schedule, check, row=8, token=1)
    else:
        fitted = fit_limits(limits, schedule, check, row=8, token=1)
        assert (fitted.max_seqs, fitted.max_tokens) == expected


def test_states_have_a_share_of_their_own(memory: Memory, tmp_path: Path) -> None:
    """Asked for by number they may take all that is left of the step; automatic rows leave half of the memory."""
    spec = read_spec(make_checkpoint(tmp_path, "qwen3_5_text", linear_value_head_dim=4096, linear_key_head_dim=256))
    of_one = spec.count_state_bytes(2)
    memory.total = memory.free = 1000 * of_one
    few = CacheConfig(memory_fraction=1.0, num_snapshots=99)
    tried = torch.bfloat16, few, GPU
    check_largest_step(spec, RankLimits(800, 800, 64), *tried, choose_shares(ScheduleConfig(max_seqs=800)))
    automatic = choose_shares(ScheduleConfig())
    with pytest.raises(ModelError, match=rf"^schedule.max_seqs=401: .* {of_one >> 20} MiB each.*; use at most 39\d$"):
        check_largest_step(spec, RankLimits(401, 401, 64), *tried, automatic)
    check_largest_step(spec, RankLimits(390, 390, 64), *tried, automatic)


def test_rows_with_large_states_leave_chunks_large() -> None:
    def check(limits: RankLimits) -> None:
        if limits.max_seqs * 1000 + limits.max_tokens > 500_000:
            raise ModelError("too much")

    fitted = fit_limits(RankLimits(8192, 32768, 100), ScheduleConfig(), check, row=1000, token=1)
    assert (fitted.max_seqs, fitted.max_tokens) == (384, 32768)


def test_graphs_of_prompts_take_little_of_the_memory(spec: ModelSpec) -> None:
    dtype = torch.bfloat16
    assert count_graph_tokens(GraphsConfig(), spec, dtype, 80 * GIB, 32768) == 4096
    wide = msgspec.structs.replace(spec, hidden_size=8192, layers=layers_of(spec.attention, 28672, spec.num_layers))
    tokens = count_graph_tokens(GraphsConfig(), wide, dtype, 24 * GIB, 32768)
    assert 512 < tokens < 4096
    assert 0.018 < count_graph_bytes(wide, dtype, 0, tokens) / (24 * GIB) <= 0.02


@pytest.mark.parametrize(
    ("graphs", "expected"),
    [
        (GraphsConfig(), 64),  # as many as a step may have
        (GraphsConfig(max_tokens=50), 50),
        (GraphsConfig(max_tokens=5000), 64),
        (GraphsConfig(max_tokens=0), 0),
        (GraphsConfig(enabled=False), 0),
    ],
)
def test_tokens_of_the_largest_graph(spec: ModelSpec, graphs: GraphsConfig, expected: int) -> None:
    assert count_graph_tokens(graphs, spec, torch.bfloat16, 80 * GIB, 64) == expected


def test_graphs_of_many_rows_take_little_of_the_memory(spec: ModelSpec) -> None:
    """With their logits. Those of 512 rows are always captured."""
    graphs, dtype = GraphsConfig(), torch.bfloat16
    assert count_graph_rows(graphs, spec, dtype, 141 * GIB, 8192) == 4096
    wide = msgspec.structs.replace(
        spec, hidden_size=4096, layers=layers_of(spec.attention, 14336, spec.num_layers), vocab_size=128_256
    )
    rows = count_graph_rows(graphs, wide, dtype, 40 * GIB, 8192)
    assert 512 < rows < 4096
    assert 0.018 < count_graph_bytes(wide, dtype, rows, 0) / (40 * GIB) <= 0.02
    assert count_graph_rows(graphs, wide, dtype, 8 * GIB, 8192) == 512


@pytest.mark.parametrize(
    ("graphs", "expected"),
    [
        (GraphsConfig(), 64),  # as many as a step may have
        (GraphsConfig(max_rows=50), 50),
        (GraphsConfig(max_rows=5000), 64),
        (GraphsConfig(enabled=False), 0),
    ],
)
def test_rows_of_the_largest_graph(spec: ModelSpec, graphs: GraphsConfig, expected: int) -> None:
    assert count_graph_rows(graphs, spec, torch.bfloat16, 80 * GIB, 64) == expected
