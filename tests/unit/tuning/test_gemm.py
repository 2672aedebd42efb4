from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.models import make_checkpoint
from tests.fakes.cublaslt import FakeLibrary
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import read_spec
from toka_async.kernels.few_rows import FewRowsProducts
from toka_async.kernels.fp8.ops import ScaledKernels
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts
from toka_async.kernels.matmul import TunedProducts
from toka_async.model.decoder import Decoder
from toka_async.model.weights import build_decoder
from toka_async.tuning import dense, gemm
from toka_async.tuning.gemm import ProductTuning, make_ops
from toka_async.tuning.store import TuningCache

NONE = TuningCache(None, {})
LIMITS = RankLimits(max_context=512, max_seqs=48, max_tokens=300)
Asked = tuple[str, tuple[int, ...], int, bool | str, list[int]]  # kind, shape, weights, use, sizes


class Recorded:
    """Stands for all choices: remembers what was measured, and what came into use."""

    kind = list[int]
    is_open = True

    def __init__(self, name: str, log: Log, asked: Asked) -> None:
        self.name = name
        self.log = log
        self.asked = asked

    def describe(self) -> dict[str, object]:
        return {"asked": self.asked}

    def admits(self, answer: list[int]) -> bool:
        return answer == [*self.asked[1]]

    def measure(self) -> list[int]:
        self.log.measured.append(self.asked)
        return [*self.asked[1]]

    def use(self, answer: list[int]) -> None:
        assert self.admits(answer)
        self.log.used.append(self.asked)


class Log:
    def __init__(self) -> None:
        self.measured: list[Asked] = []
        self.used: list[Asked] = []
        self.normed: list[tuple[int, ...]] = []
        self.biased: list[tuple[int, ...]] = []

    def make(self, name: str) -> Callable[..., Recorded]:
        def choice(
            _: object,
            weights: Sequence[Tensor],
            use: bool | str,
            sizes: Sequence[int],
            *rest: Any,
            bias: Tensor | None = None,
        ) -> Recorded:
            if name == "few-rows" and rest[-1] is not None:
                self.normed.append(tuple(weights[0].shape))
            if bias is not None:
                assert bias.shape == weights[0].shape[:1]
                self.biased.append(tuple(weights[0].shape))
            return Recorded(name, self, (name, tuple(weights[0].shape), len(weights), use, list(sizes)))

        return choice


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(dense, "AlgorithmChoice", log.make("product"))
    monkeypatch.setattr(dense, "GatedTileChoice", log.make("gated-product"))
    monkeypatch.setattr(dense, "FewRowsChoice", log.make("few-rows"))
    return log


def decoder_of(tmp_path: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Decoder:
    folder = make_checkpoint(
        tmp_path, "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=256, tie_word_embeddings=True, **{"num_hidden_layers": 3} | overrides,
    )  # fmt: skip
    return build_decoder(read_spec(folder), dtype, torch.device("cpu"))


def ops() -> FusedOps:
    return FusedOps(TunedProducts(FakeLibrary({})), GatedProducts(3))


def tune(decoder: Decoder, cache: TuningCache = NONE) -> None:
    ProductTuning(ops(), cache).tune(decoder, LIMITS, 4, lambda *_: None)


def test_matrices_by_shape_and_use(tmp_path: Path, log: Log) -> None:
    """The head for sampled rows only; those that are added to the residual by themselves."""
    tune(decoder_of(tmp_path))
    found = {(name, shape, use): (num, [sizes[0], sizes[-1]]) for name, shape, num, use, sizes in log.measured}
    assert found == {
        ("product", (128, 64), False): (3, [1, 300]),
        ("product", (64, 64), True): (3, [1, 300]),
        ("product", (192, 64), False): (3, [1, 300]),
        ("product", (64, 96), True): (3, [1, 300]),
        ("product", (256, 64), False): (1, [1, 48]),
        ("gated-product", (192, 64), "silu"): (3, [128, 300]),
    }
    assert log.used == log.measured


@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_by_shape_and_finish(tmp_path: Path, log: Log, biased: bool) -> None:
    """Matrices with a bias too: it costs our kernel nothing. What is gated has no product of its own."""
    decoder = decoder_of(tmp_path, attention_bias=biased)
    ProductTuning(FusedOps(few_rows=FewRowsProducts(0, 1)), NONE).tune(decoder, LIMITS, 4, lambda *_: None)
    added = "store" if biased else "add"  # the output of attention has a bias, too
    assert {(name, shape, use): (num, sizes) for name, shape, num, use, sizes in log.measured} == {
        ("few-rows", (128, 64), "store"): (3, [1, 2, 4, 8, 16]),
        ("few-rows", (64, 64), added): (3, [1, 2, 4, 8, 16]),
        ("few-rows", (192, 64), "silu"): (3, [1, 2, 4, 8, 16]),
        ("few-rows", (64, 96), "add"): (3, [1, 2, 4, 8, 16]),
        ("few-rows", (256, 64), "store"): (1, [1, 2, 4, 8, 16]),
    }
    assert log.biased == ([(128, 64), (64, 64)] if biased else [])


@pytest.mark.parametrize(
    ("dtype", "overrides", "normed"),
    [
        (torch.bfloat16, {}, [(128, 64), (192, 64)]),
        (torch.float16, {}, []),  # see `NORMED_DTYPES`
        (torch.bfloat16, {"attention_bias": True}, [(128, 64)]),  # the norm after attention has something to add
    ],
)
def test_few_rows_are_normed_where_they_will_be(
    tmp_path: Path, log: Log, dtype: torch.dtype, overrides: dict[str, Any], normed: list[tuple[int, ...]]
) -> None:
    decoder = decoder_of(tmp_path, dtype, **overrides)
    ProductTuning(FusedOps(few_rows=FewRowsProducts(0, 1)), NONE).tune(decoder, LIMITS, 4, lambda *_: None)
    assert log.normed == normed


def test_products_with_a_bias_are_not_tuned(tmp_path: Path, log: Log) -> None:
    tune(decoder_of(tmp_path, mlp_bias=True))
    assert {(name, shape) for name, shape, *_ in log.measured} == {
        ("product", shape) for shape in ((128, 64), (64, 64), (256, 64))
    }


def test_of_many_weights_some_are_used_in_turn(tmp_path: Path, log: Log) -> None:
    tune(decoder_of(tmp_path, num_hidden_layers=9))
    assert {num for _, _, num, *_ in log.measured} == {8, 1}


def test_a_later_start_takes_what_was_chosen(tmp_path: Path, log: Log) -> None:
    decoder, folder = decoder_of(tmp_path / "model"), tmp_path / "tuning"
    tune(decoder, TuningCache(folder, {}))
    first = [*log.measured]
    assert len(first) == 6
    tune(decoder, TuningCache(folder, {}))
    assert log.measured == first
    assert log.used == 2 * first
    tune(decoder, TuningCache(folder, {"gpu": "another"}))
    assert log.measured == 2 * first


def test_where_there_is_nothing_to_choose_nothing_is_asked(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "is_open", False)
    cache = TuningCache(tmp_path / "tuning", {})
    ProductTuning(FusedOps(None, GatedProducts(3)), cache).tune(decoder_of(tmp_path), LIMITS, 4, lambda *_: None)
    assert not log.measured
    assert not cache.num_asked


def test_memory_is_given_back(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operands, whether they were for measuring or for what was known: the cache is to have it."""
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(len(log.used)))
    decoder, folder = decoder_of(tmp_path / "model"), tmp_path / "tuning"
    for _ in range(2):
        tune(decoder, TuningCache(folder, {}))
    assert given == [6, 12]


def test_layers_alone_are_neither_found_nor_kept(tmp_path: Path, log: Log) -> None:
    decoder, cache = decoder_of(tmp_path / "model"), TuningCache(tmp_path / "tuning", {})
    ProductTuning(ops(), cache).tune_layers(decoder, [512, 1024])
    assert {(name, shape) for name, shape, *_ in log.measured} == {
        *(("product", shape) for shape in ((128, 64), (64, 64), (192, 64), (64, 96))),
        ("gated-product", (192, 64)),
    }
    assert all(sizes == [512, 1024] for *_, sizes in log.measured)
    assert log.used == log.measured
    assert not (tmp_path / "tuning").exists()


def test_a_format_without_choices_is_not_tuned(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(gemm.CHOICES, "dense")
    tune(decoder_of(tmp_path))
    assert not log.measured


def test_real_choices_come_into_use(tmp_path: Path) -> None:
    """Of a library that fails at everything: torch's."""
    products = TunedProducts(FakeLibrary({}))
    ProductTuning(FusedOps(products), NONE).tune_layers(decoder_of(tmp_path), [4])
    x, weight = torch.randn(3, 64), torch.randn(192, 64)
    torch.testing.assert_close(products.linear(x, weight), x @ weight.T)


def test_what_cannot_be_tuned_is_torchs(tmp_path: Path) -> None:
    """Whatever the GPU, which is not asked for."""
    for dtype, tuned in ((torch.float32, True), (torch.bfloat16, False)):
        ops = make_ops(torch.device("cpu"), dtype, tuned)
        assert ops.products is None
        assert ops.gates is None
        assert isinstance(ops.scaled, ScaledKernels)
        assert ops.scaled.most_few == 0
    tuning = ProductTuning(FusedOps(), NONE)
    tuning.tune(decoder_of(tmp_path), LIMITS, 4, lambda *_: None)
    tuning.tune_layers(decoder_of(tmp_path / "again"), [512])


@pytest.mark.parametrize(("capability", "fused"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_gated_products_need_a_gpu_that_copies_tensors(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fused: bool
) -> None:
    class Properties:
        multi_processor_count = 7
        L2_cache_size = 50 << 20

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr("toka_async.tuning.gemm.CublasLt", raising)
    ops = make_ops(torch.device("cpu"), torch.bfloat16, tuned=True)
    assert (ops.gates is not None) == fused
    assert ops.products is None
    assert isinstance(ops.scaled, ScaledKernels)
    assert ops.scaled.products.library is None
    assert ops.scaled.gates is ops.gates
    assert ops.scaled.few_rows is ops.few_rows


def raising(_: torch.device) -> None:
    raise OSError("no such library")
