"""Builds the configured attention backend out of the parts that work here. Knows no model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Literal

import torch

from toka_async.attention import flashinfer
from toka_async.attention.base import AttentionBackend, GraphAttention, MixedAttention
from toka_async.attention.choice import AutoChunks, AutoDecode, ChoiceTable, choose_always, every_group_pays
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.reference import ReferenceAttention
from toka_async.attention.try_out import try_chunks, try_decode
from toka_async.bar import Show, show_nothing
from toka_async.checkpoint.spec import ModelError
from toka_async.kernels.support import explain_no_kernels

if TYPE_CHECKING:  # these need Triton, which is not everywhere
    from toka_async.attention.paged import (
        DecodeKernel,
        GraphDecodePart,
        GraphPrefillPart,
        PagedAttention,
        PrefillKernel,
    )
    from toka_async.attention.wide.pages import WideLimits, WidePages
    from toka_async.kernels.prefill import PrefillConfig

logger = logging.getLogger(__name__)

Backend = Literal["auto", "reference", "triton", "flashinfer"]
LARGEST_HEAD = 512
NOT_MEASURED = choose_always("triton")  # builds the backend that is then measured


@dataclass(slots=True, frozen=True)
class BuiltAttention:
    """A backend. graphs: the same, if its decoding can be captured in CUDA graphs. mixed: for graphs of other steps.

    smallest_group: the fewest rows of a group and the fewest tokens of a prefix that can be worth sharing; (0, 0):
    none. pays: tells whether a group of so many rows and tokens is worth it. table: what chooses the parts.
    """

    backend: AttentionBackend
    graphs: GraphAttention | None = None
    smallest_group: tuple[int, int] = (0, 0)
    pays: Callable[[int, int], bool] = every_group_pays
    table: ChoiceTable | None = None
    mixed: MixedAttention | None = None


@dataclass(slots=True, frozen=True)
class AttentionLimits:
    """The limits of a backend. windows: of the layers, 0: none. max_seqs, max_tokens: of a step. sinks: to try with.

    soft_cap: of scores, see `AttentionSpec`.
    """

    cache: KVCache
    num_heads: int
    windows: tuple[int, ...]
    scale: float
    soft_cap: float
    max_seqs: int
    max_tokens: int
    sinks: torch.Tensor | None


@dataclass(slots=True, frozen=True)
class AttentionParts:
    """The parts to choose from, by name, with their cache and the limits of a step. sinks: to run them with."""

    cache: KVCache
    num_heads: int
    max_seqs: int
    max_tokens: int
    decode: Mapping[str, DecodeKernel]
    chunks: Mapping[str, PrefillKernel]
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class Sources:
    """Makers of the parts to choose from, by name. captured, captured_chunks: make the parts in graphs."""

    decode: dict[str, Callable[[], DecodeKernel]] = field(default_factory=dict)
    chunks: dict[str, Callable[[], PrefillKernel]] = field(default_factory=dict)
    captured: Callable[[], GraphDecodePart] | None = None
    captured_chunks: Callable[[], GraphPrefillPart] | None = None


def build_attention(
    backend: Backend,
    cache: KVCache,
    num_heads: int,
    windows: Sequence[int],
    max_seqs: int,
    max_tokens: int,
    scale: float | None = None,
    table: ChoiceTable = NOT_MEASURED,
    choose: Callable[[AttentionParts], ChoiceTable] | None = None,
    with_flashinfer: bool = True,
    show: Show = show_nothing,
    has_sinks: bool = False,
    soft_cap: float = 0.0,
) -> BuiltAttention:
    """Builds the backend over `cache`, for steps of up to max_seqs rows and max_tokens.

    windows: of each layer. table: to choose by. choose: makes it, once every part has run; it may measure on the cache,
    but not write. with_flashinfer: `auto` may use FlashInfer, which compiles its modules if they are missing. show:
    (parts tried, all, what they are). has_sinks: the layers have them. soft_cap: of scores, see `AttentionSpec`.

    Raises ModelError when the backend cannot attend over this cache; the message says why, and what can.
    """
    chosen = resolve_backend(backend, cache, soft_cap)
    scale = scale if scale is not None else cache.head_dim**-0.5
    sinks = _make_sinks(cache, num_heads, has_sinks)
    limits = AttentionLimits(cache, num_heads, tuple(windows), scale, soft_cap, max_seqs, max_tokens, sinks)
    sources = Sources()
    if chosen in ("auto", "triton"):
        chosen = _fall_back(chosen, cache, _add_triton(sources, limits, show))
    if chosen == "reference":
        reference = ReferenceAttention(cache, num_heads, windows, scale, soft_cap=soft_cap)
        return BuiltAttention(reference, None, reference.find_smallest_group(), every_group_pays)
    if chosen == "flashinfer" or (chosen == "auto" and with_flashinfer and not _explain_no_flashinfer(cache, soft_cap)):
        sources = _try_flashinfer(sources, limits, show, must=chosen == "flashinfer")
    if choose is not None:
        table = choose(_make_parts(sources, limits))
        logger.info("attention: %s", table.summarize())
    paged = _assemble(sources, limits, table)
    graphs = paged if sources.captured else None
    mixed = _build_mixed(sources, limits)
    return BuiltAttention(paged, graphs, table.find_smallest_group(), table.pays, table, mixed)


def _make_sinks(cache: KVCache, num_heads: int, has_sinks: bool) -> torch.Tensor | None:
    return torch.zeros(num_heads, dtype=cache.dtype, device=cache.device) if has_sinks else None


def list_triton_trials(
    cache: KVCache, num_heads: int, windows: Sequence[int], has_sinks: bool = False, soft_cap: float = 0.0
) -> list[Callable[[], None]]:
    """Lists functions that compile our best kernels by running them over `cache`, which may be small.

    Each kernel is compiled by one of them, so that they may run at the same time.
    """
    from toka_async.attention.prefix_memory import PrefixMemory
    from toka_async.attention.row_decode import RowDecode
    from toka_async.attention.triton import TritonChunks, TritonDecode
    from toka_async.attention.wide.pages import WideLimits
    from toka_async.kernels.decode_work import divide_keys
    from toka_async.kernels.launches.pdl import list_row_counts

    scale, tiles = cache.head_dim**-0.5, _list_tiles(cache, num_heads, soft_cap)[0]
    sinks = _make_sinks(cache, num_heads, has_sinks)

    def run_prefix_kernel() -> None:
        memory = PrefixMemory(cache.device, 0, cache.dtype)
        TritonDecode(cache, num_heads, scale, tiles, memory, soft_cap).run_prefix_kernel()

    def run_decode_kernels(num_rows: int, window: int) -> None:
        RowDecode(cache, num_heads, scale, soft_cap).run_each_kernel(window, [num_rows], sinks)

    def divide_rows(window: int) -> None:
        none = torch.zeros(1, dtype=torch.int32, device=cache.device)
        for skip in (None, none):
            divide_keys(none, 1, skip, window, num_programs=1)

    def run_chunk_kernel(window: int) -> None:
        try_chunks(cache, num_heads, TritonChunks(cache, num_heads, scale, tiles, soft_cap), window, sinks)

    decodes = [partial(run_decode_kernels, num_rows) for num_rows in list_row_counts(cache.device)]
    kinds: list[Callable[[int], None]] = [*decodes, run_chunk_kernel, divide_rows]
    trials: list[Callable[[], None]]
    trials = [run_prefix_kernel, *(partial(run, window) for window in sorted({0, *windows}) for run in kinds)]
    wide = _make_wide_pages(cache, num_heads, windows, soft_cap, WideLimits(most_tokens=0))
    return trials if wide is None else [*trials, partial(wide.run_each_kernel, sinks)]


def resolve_backend(backend: Backend, cache: KVCache, soft_cap: float = 0.0) -> Backend:
    """Resolves `auto`: the reference without a GPU or Triton. Raises ModelError for a backend that cannot work."""
    if backend == "reference":
        return backend
    reason = _explain_no_flashinfer(cache, soft_cap) if backend == "flashinfer" else ""
    return _fall_back(backend, cache, reason or explain_no_triton(cache))


def _fall_back(backend: Backend, cache: KVCache, reason: str) -> Backend:
    """Returns the backend if there is no reason against it, otherwise what `auto` then is. Raises ModelError."""
    if not reason:
        return backend
    if backend != "auto":
        raise ModelError(f"attention.backend={backend}: {reason}")
    if cache.device.type == "cuda":
        logger.warning("attention.backend=auto: %s; until then attention is the reference, slow on a GPU", reason)
    return "reference"


def explain_no_triton(cache: KVCache) -> str:
    """Explains why our own kernels cannot attend over the cache, and the fix; empty if they can."""
    device = cache.device
    if reason := explain_no_kernels(device):
        return f"{reason}; use {'reference' if device.type == 'cuda' else 'auto'}"
    if cache.head_dim > LARGEST_HEAD:
        return f"expected heads of at most {LARGEST_HEAD} dimensions, the model has {cache.head_dim}; use reference"
    return ""


def _explain_no_flashinfer(cache: KVCache, soft_cap: float) -> str:
    return flashinfer.explain_no_flashinfer(cache.device, cache.dtype, cache.head_dim, soft_cap)


def _add_triton(sources: Sources, limits: AttentionLimits, show: Show) -> str:
    """Adds our own parts, with the largest tiles whose kernels can be built here.

    Returns why none can, and the fix; empty if parts were added.
    """
    from toka_async.attention.prefix_memory import PrefixMemory, count_partials
    from toka_async.attention.triton import TritonChunks, TritonDecode
    from toka_async.kernels.built import UnbuiltError, explain_unbuilt, find_built

    cache, num_heads, scale = limits.cache, limits.num_heads, limits.scale
    device = cache.device
    memory = PrefixMemory(device, count_partials(device), cache.dtype)
    wide = _make_wide_pages(cache, num_heads, limits.windows, limits.soft_cap)
    if wide is not None and explain_unbuilt(partial(wide.run_each_kernel, limits.sinks)):
        wide = None

    def make_sources(tiles: PrefillConfig) -> Sources:
        decode = partial(TritonDecode, cache, num_heads, scale, tiles, memory, limits.soft_cap, wide)
        chunks = partial(TritonChunks, cache, num_heads, scale, tiles, limits.soft_cap, wide)
        return Sources({"triton": decode}, {"triton": chunks}, decode, chunks)

    configs = _list_tiles(cache, num_heads, limits.soft_cap)
    try:
        tiles = find_built(configs, lambda tiles: _try_out(make_sources(tiles), limits, show))
    except UnbuiltError as error:
        return f"our kernels cannot be built here: {error}; use reference"
    if tiles != configs[0]:
        logger.debug("attention: tiles of %d query heads, as larger ones do not fit this GPU", tiles.block_queries)
    added = make_sources(tiles)
    sources.decode, sources.chunks = added.decode, added.chunks
    sources.captured, sources.captured_chunks = added.captured, added.captured_chunks
    return ""


def _list_tiles(cache: KVCache, num_heads: int, soft_cap: float) -> list[PrefillConfig]:
    """Lists tiles of queries, the best first."""
    from toka_async.kernels.prefill import list_hopper_configs, list_prefill_configs

    shape = cache.head_dim, num_heads // cache.num_kv_heads, cache.dtype
    is_e4m3 = cache.keys[0].dtype != cache.dtype
    of_hopper = list_hopper_configs(*shape, cache.page_size, cache.device, is_e4m3, soft_cap)
    return of_hopper + list_prefill_configs(*shape)


def _make_wide_pages(
    cache: KVCache, num_heads: int, windows: Sequence[int], soft_cap: float, limits: WideLimits | None = None
) -> WidePages | None:
    """Makes room for wide pages; None: the cache is not in E4M3, or nothing reads them faster than the cache.

    Layers that all have a window read too little for them, mostly.
    """
    from toka_async.attention.wide.pages import WidePages
    from toka_async.kernels.prefill import list_hopper_configs

    shape = cache.head_dim, num_heads // cache.num_kv_heads, cache.dtype
    configs = list_hopper_configs(*shape, cache.page_size, cache.device, soft_cap=soft_cap)
    if not configs or cache.keys[0].dtype == cache.dtype or (windows and all(windows)):
        return None
    return WidePages(cache.keys, cache.values, cache.dtype, num_heads, configs[0], limits)


def _add_flashinfer(sources: Sources, limits: AttentionLimits) -> None:
    shape = flashinfer.WrapperShape(
        limits.cache,
        limits.num_heads,
        limits.scale,
        limits.max_seqs,
        limits.max_tokens,
        flashinfer.make_workspace(limits.cache, limits.num_heads),
    )
    sources.decode["flashinfer"] = lambda: flashinfer.FlashInferDecode(shape)
    sources.chunks["flashinfer"] = lambda: flashinfer.FlashInferChunks(shape)
    if "triton" in sources.decode:
        from toka_async.attention.cascade import CascadeDecode

        sources.decode["mixed"] = lambda: CascadeDecode(shape)


def _try_flashinfer(sources: Sources, limits: AttentionLimits, show: Show, must: bool) -> Sources:
    """Adds FlashInfer's parts, if they work here.

    Raises ModelError if they must work and do not.
    """
    more = replace(sources, decode=dict(sources.decode), chunks=dict(sources.chunks))
    try:
        _add_flashinfer(more, limits)
        added = {name: make for name, make in more.decode.items() if name not in sources.decode}
        _try_out(Sources(added, {"flashinfer": more.chunks["flashinfer"]}), limits, show)
    except flashinfer.FAILURES as error:
        reason = flashinfer.explain_failure(error)
        if must:
            raise ModelError(f"attention.backend=flashinfer: it does not work here: {reason}; use auto") from error
        logger.warning("attention.backend=auto: FlashInfer does not work here, so it is not used: %s", reason)
        return sources
    return more


def _try_out(sources: Sources, limits: AttentionLimits, show: Show) -> None:
    """Runs parts with every window of the model, since windows are compiled into them."""
    cache, num_heads = limits.cache, limits.num_heads
    windows = sorted({0, *limits.windows})
    total = len(windows) * (len(sources.decode) + len(sources.chunks))
    done = count()
    for window in windows:
        if "triton" in sources.decode:
            from toka_async.attention.row_decode import RowDecode

            RowDecode(cache, num_heads, limits.scale, limits.soft_cap).run_each_kernel(window, sinks=limits.sinks)
        for make_decode in sources.decode.values():
            show(next(done), total, "kernels compiled and tried")
            try_decode(cache, num_heads, make_decode(), limits.max_seqs, window, limits.sinks)
        for make_chunks in sources.chunks.values():
            show(next(done), total, "kernels compiled and tried")
            try_chunks(cache, num_heads, make_chunks(), window, limits.sinks)


def _make_parts(sources: Sources, limits: AttentionLimits) -> AttentionParts:
    return AttentionParts(
        limits.cache,
        limits.num_heads,
        limits.max_seqs,
        limits.max_tokens,
        {name: make() for name, make in sources.decode.items()},
        {name: make() for name, make in sources.chunks.items()},
        limits.sinks,
    )


def _assemble(sources: Sources, limits: AttentionLimits, table: ChoiceTable) -> PagedAttention:
    from toka_async.attention.paged import PagedAttention

    def decode() -> AutoDecode:
        parts = {name: make() for name, make in sources.decode.items()}
        captured = sources.captured() if sources.captured else None
        return AutoDecode(parts, table, limits.cache.page_size, captured)

    def chunks() -> AutoChunks:
        return AutoChunks({name: make() for name, make in sources.chunks.items()}, table)

    return PagedAttention(limits.cache, limits.num_heads, limits.windows, decode, chunks)


def _build_mixed(sources: Sources, limits: AttentionLimits) -> MixedAttention | None:
    if sources.captured is None or sources.captured_chunks is None:
        return None
    from toka_async.attention.mixed import MixedGraphAttention

    return MixedGraphAttention(
        limits.cache, limits.num_heads, limits.windows, sources.captured, sources.captured_chunks
    )
