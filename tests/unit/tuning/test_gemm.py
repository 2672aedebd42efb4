"""Which matrices are tuned, and for how many rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import read_spec
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import TILES
from toka_async.model.decoder import Decoder
from toka_async.model.weights import build_decoder
from toka_async.tuning.gemm import ProductTuning, gated_sizes, make_ops
from toka_async.tuning.store import Facts, TuningCache

T = TypeVar("T")
NONE = TuningCache(None, {})
LIMITS = RankLimits(max_context=512, max_seqs=48, max_tokens=300)


class Asked:
    """Stands for both kinds of products: remembers what is to be tuned, and what was adopted in its place."""

    library_version = 13

    def __init__(self, adopts: bool = True) -> None:
        self.adopts = adopts
        self.adopted: list[tuple[tuple[int, ...], Any, list[int], list[Any]]] = []
        self.products: list[tuple[tuple[int, ...], int, bool, list[int]]] = []
        self.gates: list[tuple[tuple[int, ...], int, str, list[int]]] = []

    def tune(self, weights: Sequence[Tensor], how: Any, sizes: Sequence[int], *rest: Any) -> None:
        found: list[Any] = self.gates if rest else self.products
        found.append((tuple(weights[0].shape), len(weights), how, list(sizes)))

    def chosen(self, weight: Tensor, how: Any) -> list[Any]:
        return [TILES[0], None] if isinstance(how, str) else [None, [*weight.shape]]

    def adopt(self, weight: Tensor, how: Any, sizes: Sequence[int], chosen: list[Any]) -> bool:
        self.adopted.append((tuple(weight.shape), how, list(sizes), chosen))
        return self.adopts

    def ranges(self) -> list[tuple[int, int]]:
        return [(64, 128)]


def decoder_of(tmp_path: Path, **overrides: Any) -> Decoder:
    folder = make_checkpoint(
        tmp_path, "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=256, tie_word_embeddings=True, **{"num_hidden_layers": 3} | overrides,
    )  # fmt: skip
    return build_decoder(read_spec(folder), torch.float32, torch.device("cpu"))


def asked_for(
    decoder: Decoder, sizes: Sequence[int] | None = None, cache: TuningCache = NONE, adopts: bool = True
) -> Asked:
    asked: Any = Asked(adopts)
    tuning = ProductTuning(FusedOps(asked, asked), cache)
    if sizes is None:
        tuning.tune(decoder, LIMITS, 4, lambda *_: None)
    else:
        tuning.tune_layers(decoder, sizes)
    assert isinstance(asked, Asked)
    return asked


def test_matrices_by_shape_and_use(tmp_path: Path) -> None:
    """The head for sampled rows only; those that are added to the residual by themselves."""
    asked = asked_for(decoder_of(tmp_path))
    sizes = {(shape, adds): (num, [sizes[0], sizes[-1]]) for shape, num, adds, sizes in asked.products}
    assert sizes == {
        ((128, 64), False): (3, [1, 300]),
        ((64, 64), True): (3, [1, 300]),
        ((192, 64), False): (3, [1, 300]),
        ((64, 96), True): (3, [1, 300]),
        ((256, 64), False): (1, [1, 48]),
    }
    assert asked.gates == [((192, 64), 3, "silu", [128, 256, 300])]


def test_products_with_a_bias_are_not_tuned(tmp_path: Path) -> None:
    asked = asked_for(decoder_of(tmp_path, mlp_bias=True))
    assert {shape for shape, *_ in asked.products} == {(128, 64), (64, 64), (256, 64)}
    assert asked.gates == []


def test_layers_alone(tmp_path: Path) -> None:
    asked = asked_for(decoder_of(tmp_path), [512, 1024])
    assert {shape for shape, *_ in asked.products} == {(128, 64), (64, 64), (192, 64), (64, 96)}
    assert all(sizes == [512, 1024] for *_, sizes in asked.products + asked.gates)
    assert len(asked.gates) == 1


def test_a_later_start_adopts_what_was_chosen(tmp_path: Path) -> None:
    decoder, folder = decoder_of(tmp_path / "model"), tmp_path / "tuning"
    first = asked_for(decoder, cache=TuningCache(folder, {}))
    assert len(first.products) == 5
    assert not first.adopted
    second = asked_for(decoder, cache=TuningCache(folder, {}))
    assert not second.products + second.gates
    assert second.adopted == [
        *((shape, adds, sizes, [None, [*shape]]) for shape, _, adds, sizes in first.products),
        *((shape, how, sizes, [TILES[0], None]) for shape, _, how, sizes in first.gates),
    ]
    for other in (asked_for(decoder, cache=TuningCache(folder, {"gpu": "another"})), asked_for(decoder)):
        assert not other.adopted
        assert other.products == first.products


def test_what_cannot_be_adopted_is_tuned(tmp_path: Path) -> None:
    decoder, folder = decoder_of(tmp_path / "model"), tmp_path / "tuning"
    first = asked_for(decoder, cache=TuningCache(folder, {}))
    second = asked_for(decoder, cache=TuningCache(folder, {}), adopts=False)
    assert len(second.adopted) == len(first.products + first.gates)
    assert (second.products, second.gates) == (first.products, first.gates)


def test_what_the_fastest_ways_depend_on(tmp_path: Path) -> None:
    """Of no more weights than are used in turn."""
    asked: list[tuple[str, object]] = []

    class Recording(TuningCache):
        def find(self, what: str, of: Facts, kind: type[T]) -> T | None:
            asked.append((what, of))
            return super().find(what, of, kind)

    deep = decoder_of(tmp_path, num_hidden_layers=9)
    found = asked_for(deep, cache=Recording(None, {}))
    sizes = next(sizes for shape, *_, sizes in found.products if shape == (64, 96))
    common = {"dtype": "torch.float32", "weights": 8, "library": 13}
    assert ("product", {"shape": [64, 96], "sizes": sizes, "adds": True, **common}) in asked
    gated = {"shape": [192, 64], "sizes": [128, 256, 300], "activation": "silu", **common}
    assert asked[-1] == ("gated-product", gated)
    assert {num for _, num, *_ in found.products + found.gates} == {8, 1}


def test_what_was_not_chosen_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps too small for a kernel."""
    decoder, folder = decoder_of(tmp_path / "model"), tmp_path / "tuning"
    monkeypatch.setattr(Asked, "chosen", lambda *_: None)
    gates: Any = Asked()
    ProductTuning(FusedOps(None, gates), TuningCache(folder, {})).tune(decoder, LIMITS, 4, lambda *_: None)
    assert len(gates.gates) == 1
    assert not folder.exists()


def test_memory_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operands, whether they were for tuning or for what was adopted: the cache is to have it."""
    given: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True))
    decoder, folder = decoder_of(tmp_path / "model"), tmp_path / "tuning"
    for number in (1, 2):
        asked_for(decoder, cache=TuningCache(folder, {}))
        assert len(given) == number


def test_gated_products_are_asked_for_beside_those_that_they_were_compared_with(tmp_path: Path) -> None:
    decoder, folder = decoder_of(tmp_path / "model"), tmp_path / "tuning"
    for products, num_tuned in ((Asked(), 1), (Asked(), 0), (None, 1), (None, 0)):
        gates: Any = Asked()
        either: Any = products
        ProductTuning(FusedOps(either, gates), TuningCache(folder, {})).tune(decoder, LIMITS, 4, lambda *_: None)
        assert len(gates.gates) == num_tuned


def test_layers_alone_are_neither_found_nor_kept(tmp_path: Path) -> None:
    decoder, folder = decoder_of(tmp_path / "model"), tmp_path / "tuning"
    asked_for(decoder, [512], TuningCache(folder, {}))
    assert not folder.exists()


def test_what_cannot_be_tuned_is_torchs(tmp_path: Path) -> None:
    """Whatever the GPU, which is not asked for."""
    for dtype, tuned in ((torch.float32, True), (torch.bfloat16, False)):
        ops = make_ops(torch.device("cpu"), dtype, tuned)
        assert ops.products is None
        assert ops.gates is None
    tuning = ProductTuning(FusedOps(), NONE)
    tuning.tune(decoder_of(tmp_path), LIMITS, 4, lambda *_: None)
    tuning.tune_layers(decoder_of(tmp_path / "again"), [512])


@pytest.mark.parametrize(("capability", "fused"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_gated_products_need_a_gpu_that_copies_tensors(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fused: bool
) -> None:
    class Properties:
        multi_processor_count = 7

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr("toka_async.tuning.gemm.CublasLt", raising)
    ops = make_ops(torch.device("cpu"), torch.bfloat16, tuned=True)
    assert (ops.gates is not None) == fused
    assert ops.products is None


def raising(_: torch.device) -> None:
    raise OSError("no such library")


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (128, [128]), (300, [128, 256, 300]), (9000, [128, 256, 512, 1024, 2048, 4096, 9000])],
    ids=str,
)
def test_gated_products_are_tuned_up_to_the_largest_step(most: int, sizes: list[int]) -> None:
    assert gated_sizes(most) == sizes
