from __future__ import annotations

from pathlib import Path

import pytest
import torch

import toka_async
from tests.cases.models import make_checkpoint
from toka_async.bench.floor import Floor, count_seconds
from toka_async.bench.step_load import Case
from toka_async.checkpoint.layer_spec import DenseFeedSpec
from toka_async.checkpoint.spec import read_spec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def floor() -> Floor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toka_async.bench.floor.LEAST_SECONDS", 1e-4)
        patch.setitem(__import__("toka_async.bench.floor", fromlist=["x"]).COPY_BYTES, "cpu", 1 << 20)
        made = Floor(read_spec(Path(toka_async.__file__).parent / "demo"), torch.float32, torch.float32, CPU)
        made.compute(Case(rows=64, context=64), grouped=False)
    made.bandwidth, made.flops = 1e9, 1e15  # so that what is read decides
    return made


def test_what_attention_reads(floor: Floor) -> None:
    each = 2 * 3 * 2 * 32 * 4  # bytes: keys and values, layers, heads, their size, float32
    alone = floor.compute(Case(rows=64, context=100, prefix=80, groups=4), grouped=False).attention
    assert alone == pytest.approx(64 * 100 * each / 1e9)
    together = floor.compute(Case(rows=64, context=100, prefix=80, groups=4), grouped=True).attention
    assert together == pytest.approx((64 * 20 + 4 * 80) * each / 1e9)
    assert floor.compute(Case(prompt=64), grouped=False).attention == pytest.approx(64 * each / 1e9)


def test_a_cache_in_e4m3_is_read_in_a_quarter_of_the_time(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(rows=64, context=100)
    plain = floor.compute(case, grouped=False)
    monkeypatch.setattr(floor, "_stored", torch.float8_e4m3fn)
    small = floor.compute(case, grouped=False)
    assert small.attention == pytest.approx(plain.attention / 4)
    assert small.matrices == plain.matrices


def test_the_parts(floor: Floor) -> None:
    parts = floor.compute(Case(rows=64, context=64), grouped=False)
    assert parts.sampling == pytest.approx(64 * 608 * 4 / 1e9)
    assert parts.total == pytest.approx(parts.matrices + parts.attention + parts.sampling)
    assert parts.total_by_torch == pytest.approx(parts.by_torch + parts.attention + parts.sampling)
    assert floor.compute(Case(prompt=64), grouped=False).sampling == pytest.approx(608 * 4 / 1e9)


def test_only_experts_that_are_chosen_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toka_async.bench.floor.LEAST_SECONDS", 1e-4)
    spec = read_spec(make_checkpoint(tmp_path, "mixtral", num_hidden_layers=1))  # 2 of 4 experts
    made = Floor(spec, torch.float32, torch.float32, CPU)
    made.bandwidth, made.flops = 1e9, 1e15
    one, many = (made.compute(Case(rows=rows, context=1), grouped=False).matrices for rows in (1, 1000))
    assert (many - one) * 1e9 == pytest.approx(4 * 2 * 3 * 48 * 40, rel=1e-3)


def test_states_are_read_and_written_whatever_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two layers with states: 4 heads of 8 x 12 numbers, and 3 inputs of 80 channels."""
    monkeypatch.setattr("toka_async.bench.floor.LEAST_SECONDS", 1e-4)
    spec = read_spec(make_checkpoint(tmp_path, "qwen3_5_text"))
    made = Floor(spec, torch.float32, torch.float32, CPU)
    made.bandwidth, made.flops = 1e9, 1e15
    keys = 2 * 2 * 2 * 16 * 4  # bytes of a token in the two layers that have them
    states = 2 * 2 * 4 * (4 * 8 * 12 + 3 * 80)
    for context in (100, 1000):
        parts = made.compute(Case(rows=5, context=context), grouped=False)
        assert parts.attention == pytest.approx(5 * context * keys / 1e9)
        assert parts.states == pytest.approx(5 * states / 1e9)
        assert parts.total == pytest.approx(parts.matrices + parts.attention + parts.states + parts.sampling)


def test_quantized_matrices_are_read_in_a_byte_each() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toka_async.bench.floor.LEAST_SECONDS", 1e-4)
        patch.setitem(__import__("toka_async.bench.floor", fromlist=["x"]).COPY_BYTES, "cpu", 1 << 20)
        spec = read_spec(Path(toka_async.__file__).parent / "demo", "fp8")
        floor = Floor(spec, torch.float32, torch.float32, CPU)
        assert floor.quantized_flops > 0
        floor.bandwidth, floor.flops, floor.quantized_flops = 1e9, 1e15, 1e15
        matrices = floor.compute(Case(rows=1, context=1), grouped=False).matrices
    quantized = sum(matrix.count_bytes(4) for matrix in spec.list_matrices(0)) * spec.num_layers
    biases = sum(matrix.bias * matrix.num_outputs for matrix in spec.list_matrices(0)) * spec.num_layers * 4
    assert matrices == pytest.approx((quantized - biases + spec.vocab_size * spec.hidden_size * 4) / 1e9)


def test_matrices_are_read_or_multiplied_with(floor: Floor) -> None:
    """Of few tokens reading them takes longer, of many multiplying; what torch measured changes neither."""
    spec = read_spec(Path(toka_async.__file__).parent / "demo")
    layer = (
        spec.hidden_size * (2 * spec.attention.num_heads + 2 * spec.attention.num_kv_heads) * spec.attention.head_dim
    )
    feed = spec.layers[0].feed
    assert isinstance(feed, DenseFeedSpec)
    layer += 3 * spec.hidden_size * feed.inner
    head = spec.vocab_size * spec.hidden_size
    few = floor.compute(Case(rows=1, context=1), grouped=False)
    assert few.matrices == pytest.approx((spec.num_layers * layer + head) * 4 / 1e9)
    assert few.by_torch > 0
    floor.flops = 1e6
    try:
        many = floor.compute(Case(rows=64, context=1), grouped=False)
        assert many.matrices == pytest.approx(2 * 64 * (spec.num_layers * layer + head) / 1e6)
    finally:
        floor.flops = 1e15


def test_short_work_is_timed_many_times() -> None:
    calls: list[int] = []
    seconds = count_seconds(lambda: calls.append(1), CPU)
    assert 0 < seconds < 1e-4
    assert len(calls) > 100
