"""Resolves `auto` for this machine, as far as possible without loading the model.

Values that a start measures stay `auto`: on a GPU the size of the cache, kernels, and the groups worth sharing.
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from toka_async.checkpoint.cost import count_stage_bytes
from toka_async.checkpoint.division import check_division, group_experts
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.implementation import read_model
from toka_async.checkpoint.limits import DeviceKind, RankLimits, resolve_limits
from toka_async.checkpoint.spec import ModelSpec
from toka_async.config import Config
from toka_async.config.sections import Section
from toka_async.listening import max_connections, max_direct_connections, raise_limits
from toka_async.topology import make_layout

AnySection = TypeVar("AnySection", bound=Section)


def resolve(config: Config) -> Config:
    """Resolve every `auto` that is known now. Raises ModelError if the configuration could not be served."""
    spec = read_model(resolve_model(config.model.path, weights=False), config.model, config.parallel)
    spec = group_experts(spec, config.parallel.ep)
    check_division(spec, config.parallel.pp, config.parallel.tp)
    raise_limits()
    limits = _fill(
        config.limits,
        max_bodies_mb=8 * config.limits.max_body_mb,
        max_unsent_mb=8 * config.limits.max_body_mb,
        max_connections=max_connections(config.limits, config.zmq),
    )
    direct = _fill(config.zmq, max_connections=max_direct_connections(config.zmq) or "auto")  # auto: no endpoint
    several = config.parallel.pp > 1  # otherwise there is nothing to divide
    parallel = _fill(
        config.parallel,
        pp_micro_batches=config.parallel.num_micro_batches if several else "auto",
        async_tp_min_tokens=0 if config.parallel.tp == 1 else "auto",
    )
    config = replace(config, limits=limits, zmq=direct, parallel=parallel)
    return _resolve_simulated(config, spec) if config.model.device == "simulated" else _resolve_device(config, spec)


def _resolve_simulated(config: Config, spec: ModelSpec) -> Config:
    from toka_async.startup.simulated import make_simulated_ready

    ready = make_simulated_ready(spec, config.model, config.cache, config.schedule)
    limits = resolve_limits(config.model, config.schedule, spec, "simulated")
    return _fill_limits(config, limits, ready.num_pages * ready.page_size)


def _resolve_device(config: Config, spec: ModelSpec) -> Config:
    from toka_async.capacity import device_memory, make_plan
    from toka_async.checkpoint.limits import resolve_num_pages
    from toka_async.startup.cache_size import count_page_bytes
    from toka_async.startup.device import resolve_device, resolve_dtype, resolve_num_threads
    from toka_async.startup.memory import choose_cpu_cache_bytes
    from toka_async.tuning.store import find_folder

    device = resolve_device(config.model)
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    dtype = resolve_dtype(config.model, spec, device)
    model = _fill(config.model, device=kind, dtype=str(dtype).removeprefix("torch."))
    tuning = _fill(config.tuning, dir=str(find_folder(config.tuning.dir) or ""))
    config = replace(config, model=model, tuning=tuning)
    memory = device_memory() if kind == "cuda" else None
    if memory is not None:
        return _fill_limits(config, make_plan(config, memory).limits, "auto")
    num_sharing = config.parallel.dp * make_layout(config).ranks_per_node
    num_parameters = count_stage_bytes(spec, True, True, itemsize=1) // (config.parallel.pp * config.parallel.tp)
    attention = _fill(
        config.attention,
        backend="reference",
        num_threads=resolve_num_threads(config.attention, num_parameters, num_sharing),
    )
    limits = resolve_limits(config.model, config.schedule, spec, kind)
    num_tokens: int | str = "auto"
    if config.parallel.pp * config.parallel.tp == 1:  # otherwise the fullest rank decides
        page_bytes = count_page_bytes(spec.fit_context(limits.max_context), config.cache, dtype)
        pages = resolve_num_pages(config.cache, limits, page_bytes, *choose_cpu_cache_bytes(num_sharing))
        num_tokens = pages * config.cache.page_size
    return _fill_limits(replace(config, attention=attention), limits, num_tokens)


def _fill_limits(config: Config, limits: RankLimits, num_tokens: int | str) -> Config:
    return replace(
        config,
        model=_fill(config.model, max_context=limits.max_context),
        cache=_fill(config.cache, num_tokens=num_tokens),
        schedule=_fill(config.schedule, max_seqs=limits.max_seqs, max_tokens=limits.max_tokens),
    )


def _fill(section: AnySection, **values: Any) -> AnySection:
    """Replace those values of the section that are `auto`."""
    return replace(section, **{name: value for name, value in values.items() if getattr(section, name) == "auto"})
