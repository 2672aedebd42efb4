"""`toka-async models`: which models run, by whose code, and what would become of a given one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from toka_async.checkpoint.cost import count_stage_bytes
from toka_async.checkpoint.division import check_division, group_experts
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.implementation import (
    NATIVE,
    Architecture,
    LibraryQuestion,
    ask_library,
    choose_implementation,
    read_model,
)
from toka_async.checkpoint.json_file import JsonFile, ModelError
from toka_async.checkpoint.spec import ModelSpec
from toka_async.config import Config

GIB = 1 << 30
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RunnableModels(msgspec.Struct, frozen=True):
    """native: types of models that our code computes. transformers: others that the library has, and its version.

    problem: why the library was not asked.
    """

    native: tuple[str, ...]
    transformers: tuple[Architecture, ...] = ()
    problem: str = ""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of a model. problem: why it would not be served; empty: it would.

    impl: whose code would compute it. weights: as they would be loaded, "bfloat16, weights in fp8/block". weight_bytes,
    kv_bytes_per_token: of one replica, without division among GPUs. hint: what to try instead.
    """

    path: str
    model_type: str
    impl: str
    problem: str = ""
    hint: str = ""
    weights: str = ""
    num_layers: int = 0
    max_context: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


def list_models() -> RunnableModels:
    """Asks the library if it is installed, which takes some seconds."""
    native = tuple(sorted(NATIVE))
    try:
        found = ask_library(LibraryQuestion()).architectures
    except ModelError as error:
        return RunnableModels(native, problem=str(error))
    return RunnableModels(native, tuple(each for each in found if each.model_type not in NATIVE))


def report_model(config: Config) -> ModelReport:
    """Raises ModelError only if there is no such model, or its configuration cannot be read."""
    model_dir = resolve_model(config.model.path, weights=False)
    model_type = JsonFile(model_dir / "config.json").text("model_type")
    report, impl = ModelReport(path=config.model.path, model_type=model_type, impl=config.model.impl), ""
    try:
        impl = choose_implementation(model_dir, config.model)
        spec = read_model(model_dir, config.model, config.parallel)
        check_division(group_experts(spec, config.parallel.ep), config.parallel.pp, config.parallel.tp)
        return _describe(report, impl, spec, config)
    except ModelError as error:
        hint = _find_hint(model_dir, config) if impl == "native" else ""
        return msgspec.structs.replace(report, impl=impl or report.impl, problem=str(error), hint=hint)


def _describe(report: ModelReport, impl: str, spec: ModelSpec, config: Config) -> ModelReport:
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    itemsize, is_e4m3 = ITEMSIZES[dtype], config.cache.dtype == "fp8"
    return msgspec.structs.replace(
        report,
        impl=impl,
        weights=spec.name_formats(dtype),
        num_layers=spec.num_layers,
        max_context=spec.max_context,
        weight_bytes=count_stage_bytes(spec, is_first=True, is_last=True, itemsize=itemsize),
        kv_bytes_per_token=sum(each.cached_values for each in spec.attentions) * (1 if is_e4m3 else itemsize),
    )


def _find_hint(model_dir: Path, config: Config) -> str:
    """Says whether the library would run what our code refuses, and if not, why."""
    try:
        read_model(model_dir, msgspec.structs.replace(config.model, impl="transformers"), config.parallel)
    except ModelError as error:
        return f"model.impl=transformers cannot run it either: {error}"
    return "model.impl=transformers would run it"


def list_lines(models: RunnableModels) -> Iterator[str]:
    """The list for people."""
    yield "Names are those of model_type in a model's config.json."
    yield ""
    yield "native (model.impl=native): our own layers and kernels"
    yield from _wrap(models.native)
    yield ""
    if models.problem:
        yield f"through transformers (model.impl=transformers): {models.problem}"
        return
    yield "through transformers (model.impl=transformers), if a trial with the model's configuration succeeds"
    yield from _wrap([each.model_type for each in models.transformers if not each.problem])
    problems = dict.fromkeys(each.problem for each in models.transformers if each.problem)
    for problem in sorted(problems):
        yield ""
        yield f"not at all: {problem}"
        yield from _wrap([each.model_type for each in models.transformers if each.problem == problem])


def report_lines(report: ModelReport) -> Iterator[str]:
    """The report for people."""
    yield f"{report.path}: model_type {report.model_type}"
    if report.problem:
        yield f"would be refused: {report.problem}"
        if report.hint:
            yield report.hint
        return
    yield f"would run: {'natively' if report.impl == 'native' else 'through transformers'} (model.impl={report.impl})"
    yield f"{report.num_layers} layers, {report.weights}, at most {report.max_context:,} tokens a sequence"
    yield f"weights {report.weight_bytes / GIB:.2f} GiB, KV cache {report.kv_bytes_per_token / 1024:.1f} KiB a token"


def _wrap(names: Sequence[str], width: int = 100) -> Iterator[str]:
    """Lines of names, indented."""
    line = ""
    for index, name in enumerate(names):
        item = name + ("," if index < len(names) - 1 else "")
        if line and len(line) + len(item) + 3 > width:
            yield f"  {line}"
            line = ""
        line = f"{line} {item}".strip()
    if line:
        yield f"  {line}"
