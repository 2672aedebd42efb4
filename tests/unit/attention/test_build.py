"""Which backend a configuration gets where, with messages that say why not another, and which parts it is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import get_args

import pytest
import torch

pytest.importorskip("triton")

from tests.cases.attention import make_case
from tests.fakes import flashinfer as fake_flashinfer
from toka_async.attention import build, flashinfer
from toka_async.attention.build import AttentionParts, Backend, build_attention, list_triton_trials, resolve_backend
from toka_async.attention.choice import AutoChunks, AutoDecode, ChoiceTable, choose_always
from toka_async.attention.kv_cache import E4M3, CacheFormat, KVCache
from toka_async.attention.reference import ReferenceAttention
from toka_async.attention.triton import TritonChunks, TritonDecode
from toka_async.attention.wide.pages import WidePages
from toka_async.checkpoint.spec import ModelError
from toka_async.config.load import describe
from toka_async.kernels import prefill, support

BF16 = torch.bfloat16


def cache_of(dim: int = 64, dtype: torch.dtype = BF16, on_cuda: bool = True) -> KVCache:
    cache = KVCache(1, 20, 1, 4, dim, dtype, torch.device("cpu"))
    if on_cuda:
        cache.device = torch.device("cuda")
    return cache


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Those that are installed."""
    names = {"triton", "flashinfer"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in names else None)
    monkeypatch.setattr(support, "find_spec", lambda name: name if name in names else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return names


def test_the_configuration_knows_the_same_backends() -> None:
    (field,) = [field for field in describe() if field.key == "attention.backend"]
    assert field.type.split(" or ") == sorted(get_args(Backend))


@pytest.mark.usefixtures("packages")
def test_what_is_asked_for_on_a_gpu() -> None:
    assert [resolve_backend(backend, cache_of()) for backend in get_args(Backend)] == list(get_args(Backend))
    assert resolve_backend("auto", cache_of(80, torch.float32)) == "auto"
    assert resolve_backend("triton", cache_of(80, torch.float32)) == "triton"


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_reference_on_a_cpu(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(on_cuda=False)
    built = build_attention(backend, cache, 2, (0, 7), max_seqs=8, max_tokens=8, scale=0.3)
    assert isinstance(built.backend, ReferenceAttention)
    assert (built.backend.windows, built.backend.scale) == ((0, 7), 0.3)
    assert built.smallest_group == built.backend.find_smallest_group()
    assert (built.graphs, built.mixed, built.table) == (None, None, None)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("backend", "cache", "message"),
    [
        ("triton", cache_of(on_cuda=False), "expected a CUDA device, got cpu; use auto"),
        ("flashinfer", cache_of(on_cuda=False), "expected a CUDA device, got cpu; use auto"),
        ("triton", cache_of(640), "expected heads of at most 512 dimensions, the model has 640; use reference"),
        ("flashinfer", cache_of(80), "expected heads of 64, 128 or 256 dimensions, the model has 80; use auto"),
        (
            "flashinfer",
            cache_of(dtype=torch.float32),
            "expected model.dtype bfloat16 or float16, got float32; use auto",
        ),
    ],
)
@pytest.mark.usefixtures("packages")
def test_what_cannot_be_had(backend: Backend, cache: KVCache, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_backend(backend, cache)
    assert str(caught.value).startswith(f"attention.backend={backend}: {message}")


@pytest.mark.usefixtures("packages")
def test_soft_caps_are_for_our_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"=flashinfer: the model limits attention's scores .*; use auto or triton$"):
        resolve_backend("flashinfer", cache_of(), soft_cap=50.0)
    assert [resolve_backend(backend, cache_of(), 50.0) for backend in ("auto", "triton")] == ["auto", "triton"]
    assert not caplog.messages


def test_packages_that_are_not_there(packages: set[str], caplog: pytest.LogCaptureFixture) -> None:
    packages.remove("flashinfer")
    with pytest.raises(ModelError) as caught:
        resolve_backend("flashinfer", cache_of())
    assert str(caught.value) == (
        "attention.backend=flashinfer: the package flashinfer-python is not installed; "
        "pip install 'flashinfer-python<0.7', or use auto"
    )
    assert resolve_backend("auto", cache_of()) == "auto"
    packages.remove("triton")
    with pytest.raises(ModelError, match="=triton: the package triton is not installed"):
        resolve_backend("triton", cache_of())
    assert not caplog.messages
    assert resolve_backend("auto", cache_of()) == "reference"
    assert "the package triton is not installed" in caplog.text


@pytest.mark.usefixtures("packages")
def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    for backend in ("triton", "flashinfer"):
        with pytest.raises(ModelError, match=r"capability 8\.0 or more, got 7\.5; use reference"):
            resolve_backend(backend, cache_of())
    assert not caplog.messages
    assert resolve_backend("auto", cache_of()) == "reference"
    assert "got 7.5; use reference; until then attention is the reference" in caplog.text


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is there."""
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(build, "resolve_backend", lambda backend, *_: backend)
    monkeypatch.setattr(flashinfer, "explain_no_flashinfer", lambda *_: "")
    monkeypatch.setattr(build, "try_decode", lambda *_: None)
    monkeypatch.setattr(build, "try_chunks", lambda *_: None)


def parts_of(built: build.BuiltAttention, window: int) -> tuple[AutoDecode, AutoChunks]:
    from toka_async.attention.paged import PagedAttention

    assert isinstance(built.backend, PagedAttention)
    decode, chunks = built.backend.decodes[window], built.backend.chunks[window]
    assert isinstance(decode, AutoDecode)
    assert isinstance(chunks, AutoChunks)
    return decode, chunks


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("backend", "decode_names", "chunk_names"),
    [
        ("triton", ["triton"], ["triton"]),
        ("flashinfer", ["flashinfer"], ["flashinfer"]),
        ("auto", ["triton", "flashinfer", "mixed"], ["triton", "flashinfer"]),
    ],
)
def test_parts(backend: Backend, decode_names: list[str], chunk_names: list[str]) -> None:
    cache = cache_of(on_cuda=False)
    built = build_attention(backend, cache, 2, (0, 7), max_seqs=8, max_tokens=8)
    for window in (0, 7):
        decode, chunks = parts_of(built, window)
        assert (list(decode.parts), list(chunks.parts)) == (decode_names, chunk_names)
        assert (decode.captured is not None) == ("triton" in decode_names)
    assert built.graphs is (built.backend if "triton" in decode_names else None)
    assert (built.mixed is not None) == ("triton" in decode_names)
    assert parts_of(built, 0)[0].parts[decode_names[0]] is not parts_of(built, 7)[0].parts[decode_names[0]]


@pytest.fixture
def refused_tiles(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Query heads of the tiles whose kernels need more shared memory than this GPU has."""
    from triton.runtime.errors import OutOfResources

    refused: set[int] = set()

    def try_chunks(_: KVCache, __: int, part: TritonChunks, *___: object) -> None:
        if part.config.block_queries in refused:
            raise OutOfResources(106_496, 101_376, "shared memory")

    monkeypatch.setattr(build, "try_chunks", try_chunks)
    return refused


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("choose", [None, lambda _: choose_always("triton")], ids=["trial", "start"])
def test_tiles_that_do_not_fit_are_not_used(
    refused_tiles: set[int],
    choose: Callable[[AttentionParts], ChoiceTable] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    refused_tiles.add(128)
    cache = cache_of(256, on_cuda=False)
    built = build_attention("triton", cache, 2, (0,), max_seqs=8, max_tokens=8, choose=choose)
    decode, chunks = (auto.parts["triton"] for auto in parts_of(built, 0))
    assert isinstance(decode, TritonDecode)
    assert isinstance(chunks, TritonChunks)
    assert decode.tile_config == chunks.config
    assert chunks.config.block_queries == 64
    assert "tiles of 64 query heads" in caplog.text


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("stored", [E4M3, torch.float32])
@pytest.mark.parametrize("is_built", [True, False])
def test_wide_pages_of_a_cache_in_e4m3(monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, is_built: bool) -> None:
    """All parts share them, where a kernel for them is chosen and can be built."""

    def list_tiles(*_: object, is_e4m3: bool = False, soft_cap: float = 0.0) -> list[prefill.PrefillConfig]:
        return [] if is_e4m3 or soft_cap else [prefill.PrefillConfig(16, 16, num_warps=4, num_stages=1)]

    def refuse(*_: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(prefill, "list_hopper_configs", list_tiles)
    if not is_built:
        monkeypatch.setattr(WidePages, "run_each_kernel", refuse)
    cache = KVCache(1, 20, 1, 4, 16, torch.float32, torch.device("cpu"), stored=CacheFormat(stored))
    built = build_attention("triton", cache, 2, (0, 7), max_seqs=8, max_tokens=8)
    decode, chunks = (auto.parts["triton"] for auto in parts_of(built, 0))
    other, _ = (auto.parts["triton"] for auto in parts_of(built, 7))
    assert isinstance(decode, TritonDecode)
    assert isinstance(other, TritonDecode)
    assert isinstance(chunks, TritonChunks)
    assert (decode.wide is not None) == (stored == E4M3 and is_built)
    assert decode.wide is chunks.wide
    assert decode.wide is other.wide
    windowed, _ = (
        auto.parts["triton"]
        for auto in parts_of(build_attention("triton", cache, 2, (7,), max_seqs=8, max_tokens=8), 7)
    )
    assert isinstance(windowed, TritonDecode)
    assert windowed.wide is None
    assert len(list_triton_trials(cache, 2, (0,))) == 4 + (stored == E4M3)
    assert len(list_triton_trials(cache, 2, (0,), soft_cap=2.0)) == 4


@pytest.mark.usefixtures("as_on_a_gpu")
def test_kernels_that_do_not_fit_at_all(refused_tiles: set[int]) -> None:
    refused_tiles |= {64, 128}
    cache = cache_of(256, on_cuda=False)
    with pytest.raises(ModelError, match="=triton: our kernels cannot be built here: out of resource: shared memory"):
        build_attention("triton", cache, 2, (0,), max_seqs=8, max_tokens=8)
    built = build_attention("auto", cache, 2, (0,), max_seqs=8, max_tokens=8)
    assert isinstance(built.backend, ReferenceAttention)
    assert built.graphs is None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_chosen_table_is_used(caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_always("flashinfer", ((4, 64),))
    asked: list[AttentionParts] = []

    def choose(parts: AttentionParts) -> ChoiceTable:
        asked.append(parts)
        return chosen

    caplog.set_level(logging.INFO)
    built = build_attention("auto", cache_of(on_cuda=False), 2, (0,), max_seqs=8, max_tokens=9, choose=choose)
    assert built.smallest_group == (4, 64)
    assert built.table is chosen
    (parts,) = asked
    assert (parts.max_seqs, parts.max_tokens, parts.num_heads) == (8, 9, 2)
    assert list(parts.decode) == ["triton", "flashinfer", "mixed"]
    assert list(parts.chunks) == ["triton", "flashinfer"]
    assert "groups of rows x tokens 4x64" in caplog.text
    decode, chunks = parts_of(built, 0)
    assert decode.table is chunks.table is chosen


@pytest.mark.usefixtures("as_on_a_gpu")
def test_where_it_does_not_work_auto_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Could not find nvcc\nand more")

    monkeypatch.setattr(flashinfer, "FlashInferDecode", fail)
    cache = cache_of(on_cuda=False)
    built = build_attention("auto", cache, 2, (0,), max_seqs=8, max_tokens=8)
    assert list(parts_of(built, 0)[0].parts) == ["triton"]
    assert caplog.messages == [
        "attention.backend=auto: FlashInfer does not work here, so it is not used: Could not find nvcc"
    ]
    with pytest.raises(ModelError, match="backend=flashinfer: it does not work here: Could not find nvcc; use auto"):
        build_attention("flashinfer", cache, 2, (0,), max_seqs=8, max_tokens=8)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_auto_waits_for_no_modules() -> None:
    cache = cache_of(on_cuda=False)
    built = build_attention("auto", cache, 2, (0,), max_seqs=8, max_tokens=8, with_flashinfer=False)
    decode, chunks = parts_of(built, 0)
    assert (list(decode.parts), list(chunks.parts)) == (["triton"], ["triton"])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_every_window_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []
    monkeypatch.setattr(
        build, "try_decode", lambda _, __, part, ___, window, ____: tried.append((type(part).__name__, window))
    )
    cache = make_case(0, 4, 1, 2, 16, contexts=[5]).cache
    shown: list[tuple[int, int]] = []

    def choose(_: AttentionParts) -> ChoiceTable:
        return choose_always("triton")

    def show(done: int, total: int, _: str) -> None:
        shown.append((done, total))

    build_attention("auto", cache, 2, (7, 7), max_seqs=8, max_tokens=8, choose=choose, show=show)
    names = ("TritonDecode", "FlashInferDecode", "CascadeDecode")
    assert sorted(tried) == sorted((name, window) for name in names for window in (0, 7))
    assert shown == [(done, total) for total in (4, 6) for done in range(total)]


def test_each_kernel_is_compiled_by_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials may run at the same time: none compiles what another one does."""
    ran: list[str] = []
    for path in (
        *("attention.triton.attend_chunks", "attention.triton.attend_prefixes"),
        *("attention.row_decode.decode_attention", "kernels.decode_work.divide_keys"),
    ):
        name = path.rpartition(".")[2]
        monkeypatch.setattr(f"toka_async.{path}", lambda *_, name=name, **__: ran.append(name))
    trials, kinds = list_triton_trials(cache_of(on_cuda=False), 2, (7, 7)), list[set[str]]()
    for trial in trials:
        ran.clear()
        trial()
        kinds.append(set(ran))
    of_window = [{"decode_attention"}, {"attend_chunks"}, {"divide_keys"}]
    assert kinds == [{"attend_prefixes"}, *of_window, *of_window]
