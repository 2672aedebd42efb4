"""How far a quantized model's logits are from the unquantized model's, and from what its format says they are.

    python scripts/measure_logit_errors.py model.path=MODEL model.load=random
    python scripts/measure_logit_errors.py --formats none,fp8 --folder KEPT model.path=MODEL model.load=random
    python scripts/measure_logit_errors.py --layers 4 --caches auto model.path=MODEL model.load=random

Every model is an ordinary rank with its measured kernels, but without graphs. It computes prompts of random tokens in
chunks, then random tokens one by one, the same in all models. Compared are the logits of all positions, apart for
prompts and decoded tokens:

* with those of the unquantized model, which has the same weights (random ones depend on a tensor's name alone) and a
  cache of its own dtype;
* with the format's: the same quantized weights and the same cache's format, all inputs of quantized matrices quantized,
  products and everything else in float32. Kernels for few rows take inputs as they are, which is better than that;
* the same, but with the inputs of the same products left as they are, if the model did so.

What is left is the kernels' arithmetic and the model's dtype. An input that is rounded to bfloat16 may become the next
number of 8 bits, which is a larger difference than that of any sum; with `model.dtype=float32` kernels are left alone.
The unquantized model is compared with its own weights in float32, which tells how much of that is bfloat16's.

A line has the root mean square of the difference and the largest one, both in standard deviations of the logits that
are compared with, the mean KL divergence from these, and the share of positions whose likeliest token is the same. One
model is in memory at a time, each in a process of its own; a reference that does not fit is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from toka_async.attention.base import AttentionBackend, AttentionBatch
from toka_async.attention.build import Backend
from toka_async.attention.kv_cache import E4M3, CacheFormat, make_cache, view_numbers
from toka_async.bar import show_nothing
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.implementation import read_model
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.config import Config, ConfigError, load_config
from toka_async.kernels.experts.weights import ExpertWeights
from toka_async.kernels.scaled_weight import BLOCK, Quantized, ScaledWeight
from toka_async.model.decoder import Decoder, RankModel
from toka_async.model.matrices.ops import Norm, Ops, TorchOps
from toka_async.model.matrices.scaling import dequantize, quantize
from toka_async.model.matrices.torch_experts import mix_experts
from toka_async.model.weights import build_decoder
from toka_async.startup.progress import StartupProgress
from toka_async.startup.rank_attention import AttentionSetup, build_rank_attention
from toka_async.startup.runner_factory import RunnerFactory

FORMATS = {"none": "unquantized", "fp8": "fp8 by channel", "fp8_block": "fp8 by block"}  # of `model.quantize`
CACHES = ("auto", "fp8")  # of `cache.dtype`
EXPERTS = "experts"
FEW_ROWS = 16  # that a kernel takes as they are, at most
LARGEST_ERROR = 0.1  # of quantized weights, relative to the others; those of other numbers differ by 1.4
SAMPLED_LAYER, SAMPLED_ROWS = "model.layers.0.", 4
ROWS_AT_ONCE = 64  # of logits, as they are compared
SPARE_BYTES = 4 << 30  # of a reference, beside its weights: a matrix in float32, logits, the cache


@dataclass(slots=True)
class PlainInputs:
    """Which products' inputs a model left as they are: those seen, or all."""

    all: bool = False
    seen: set[tuple[str, int, int, int, bool]] = field(default_factory=set)

    def add(self, finish: str, x: Tensor, weight: Tensor | ScaledWeight, normed: bool = False) -> None:
        """finish: see `FewRowsProducts`. normed: x is normed as the product reads it."""
        self.seen.add((finish, len(x), weight.shape[-2], weight.shape[-1], normed))

    def has(self, finish: str, x: Tensor, weight: Tensor | ScaledWeight, normed: bool = False) -> bool:
        return self.all or (finish, len(x), weight.shape[-2], weight.shape[-1], normed) in self.seen


def watch_inputs(ops: Ops) -> PlainInputs:
    """Notes from now on which products with quantized weights leave their inputs as they are."""
    kernels: Any = ops.scaled
    if kernels is None:  # weights are dequantized for each product
        return PlainInputs(all=True)
    plain, compute_few = PlainInputs(), kernels.compute_few

    def watch_few(
        finish: str,
        x: Tensor,
        weight: ScaledWeight,
        bias: Tensor | None = None,
        output: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor | None:
        product: Tensor | None = compute_few(finish, x, weight, bias, output, norm)
        if product is not None:
            plain.add(finish, x, weight, norm is not None)
        return product

    kernels.compute_few = watch_few
    experts: Any = getattr(ops, "experts", None)
    if experts is not None:
        compute = experts.compute

        def watch_experts(plan: Any, x: Tensor, routes: Any, weights: ExpertWeights, *rest: Any) -> None:
            if plan.gated is None:
                plain.add(EXPERTS, x, weights.down)
            compute(plan, x, routes, weights, *rest)

        experts.compute = watch_experts
    return plain


def quantize_rows(x: Tensor, by_block: bool) -> Quantized:
    """Quantizes inputs [t, k] with a scale for each token, or for each `BLOCK` inputs of a token."""
    return quantize(x, 1, BLOCK if by_block else x.shape[1])


def dequantize_rows(rows: Quantized) -> Tensor:
    values, scales = rows
    return dequantize(values, scales, 1, BLOCK if scales.shape[1] > 1 else values.shape[1])


class FormatProducts:
    """`ScaledOps` in plain torch and float32: what the format says, whatever kernels do."""

    def __init__(self, plain: PlainInputs) -> None:
        self._plain = plain
        self._ops = TorchOps()
        self.most_few = FEW_ROWS

    def quantize(self, x: Tensor, by_block: bool) -> Quantized:
        return quantize_rows(x, by_block)

    def quantize_norm(self, x: Tensor, residual: Tensor | None, norm: Norm, by_block: bool) -> tuple[Quantized, Tensor]:
        normed, total = self._ops.add_norm(x, residual, *norm)
        return quantize_rows(normed, by_block), total

    def quantize_gate(self, gate_up: Tensor, activation: str, by_block: bool) -> Quantized:
        return quantize_rows(self._ops.gate(gate_up, activation), by_block)

    def linear(self, rows: Quantized, weight: ScaledWeight, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return F.linear(dequantize_rows(rows), self._widen(weight), bias).to(dtype)

    def gated_linear(
        self,
        rows: Quantized,  # noqa: ARG002
        weight: ScaledWeight,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
        activation: str,  # noqa: ARG002
    ) -> Tensor | None:
        return None

    def add(self, residual: Tensor, rows: Quantized, weight: ScaledWeight) -> tuple[Tensor | None, Tensor]:
        return self.linear(rows, weight, residual.dtype, None), residual

    def compute_few(
        self,
        finish: str,
        x: Tensor,
        weight: ScaledWeight,
        bias: Tensor | None = None,
        output: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor | None:
        if not self._plain.has(finish, x, weight, norm is not None):
            return None
        product = self._ops.linear(x, self._widen(weight), bias, norm)
        if finish == "add":
            assert output is not None
            return output.add_(product)
        return product if finish == "store" else self._ops.gate(product, finish)

    def _widen(self, weight: ScaledWeight) -> Tensor:
        if weight.by_block:
            return dequantize(weight.values, weight.scales, BLOCK, BLOCK)
        return dequantize(weight.values, weight.scales[:, None], 1, weight.shape[1])


class RoundedInputs(TorchOps):
    """Multiplies by what inputs are once they are quantized."""

    def __init__(self, by_block: bool) -> None:
        self._by_block = by_block

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        assert norm is None
        return super().linear(dequantize_rows(quantize_rows(x, self._by_block)), weight, bias)


class FormatOps(TorchOps):
    """Operations of the reference, on any device."""

    def __init__(self, plain: PlainInputs) -> None:
        """plain: the products whose inputs are not quantized."""
        self._plain = plain
        self.scaled = None if plain.all else FormatProducts(plain)

    def mix_experts(
        self, x: Tensor, logits: Tensor, experts: ExpertWeights, residual: Tensor | None, of_all: Any = None
    ) -> Tensor:
        scales, ops = experts.gate_up_scales, TorchOps()
        if scales is not None and not self._plain.has(EXPERTS, x, experts.down):
            ops = RoundedInputs(by_block=scales.ndim == 3)
        return mix_experts(ops, x, logits, experts, residual, of_all)


@dataclass(slots=True, frozen=True)
class Text:
    """Token ids [rows, tokens] of all rows; up to each of the ends they are chunks of prompts, behind them decoded."""

    tokens: Tensor
    chunk_ends: tuple[int, ...]

    @property
    def num_prompt(self) -> int:
        return self.chunk_ends[-1]

    def list_steps(self) -> Iterator[tuple[int, int]]:
        """Yields the first token of each step and the one behind the last."""
        yield from pairwise((0, *self.chunk_ends, *range(self.num_prompt + 1, self.tokens.shape[1] + 1)))


def make_text(vocab_size: int, num_rows: int, num_prompt: int, num_chunks: int, num_decoded: int) -> Text:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (num_rows, num_prompt + num_decoded), generator=generator)
    return Text(tokens, tuple(num_prompt * (chunk + 1) // num_chunks for chunk in range(num_chunks)))


@dataclass(slots=True, frozen=True)
class AttentionChoice:
    """Whose attention, over which cache. stored: a value of `cache.dtype`."""

    backend: Backend
    stored: str
    page_size: int
    limits: RankLimits


@torch.inference_mode()
def compute_logits(
    decoder: RankModel, spec: ModelSpec, dtype: torch.dtype, choice: AttentionChoice, text: Text
) -> Tensor:
    """Returns the logits of all positions, float32 [rows, tokens, vocab] on the host."""
    device = next(cast(nn.Module, decoder).parameters()).device
    num_rows, num_tokens = text.tokens.shape
    num_pages = -(-num_tokens // choice.page_size)  # of a row
    stored = CacheFormat(E4M3 if choice.stored == "fp8" else dtype)
    cache = make_cache(spec, num_rows * num_pages, choice.page_size, dtype, device, stored=stored)
    setup = AttentionSetup(choice.backend, False, choice.limits, None, False, show_nothing)
    backend = build_rank_attention(spec, [cache], setup).backend
    logits = torch.empty(num_rows, num_tokens, spec.vocab_size)
    for start, end in text.list_steps():
        hidden = _compute_step(decoder, backend, text, num_pages, choice.page_size, start, end, device)
        logits[:, start:end] = decoder.logits(hidden).reshape(num_rows, end - start, -1)
    return logits


def _compute_step(
    decoder: RankModel,
    backend: AttentionBackend,
    text: Text,
    num_pages: int,
    page_size: int,
    start: int,
    end: int,
    device: torch.device,
) -> Tensor:
    """Computes tokens from `start` to `end` of all rows, each of which has so many pages of its own."""
    num_rows, count = len(text.tokens), end - start
    pages = torch.arange(num_rows * num_pages).view(num_rows, num_pages)
    positions = torch.arange(start, end)
    places = pages[:, positions // page_size] * page_size + positions % page_size
    contexts = np.full(num_rows, end, np.int32)
    backend.plan(
        AttentionBatch(
            num_decode=num_rows if start >= text.num_prompt else 0,
            query_lengths=np.full(num_rows, count, np.int32),
            context_lengths=contexts,
            contexts=torch.from_numpy(contexts).to(device),
            slots=torch.arange(num_rows, device=device),
            page_table=pages.to(device, torch.int32),
            write_indices=places.flatten().to(device),
        )
    )
    tokens = text.tokens[:, start:end].flatten().to(device)
    return decoder.forward(tokens, positions.repeat(num_rows).to(device), backend)


@torch.inference_mode()
def take_state(decoder: RankModel) -> dict[str, Tensor]:
    """Returns all parameters on the host; those of 8 bits as bytes."""
    return {name: view_numbers(each.data).cpu() for name, each in cast(nn.Module, decoder).named_parameters()}


@torch.inference_mode()
def build_reference(spec: ModelSpec, state: dict[str, Tensor], plain: PlainInputs, device: torch.device) -> Decoder:
    """Builds a model in float32 with the weights of another's state. plain: the products without quantized inputs."""
    decoder = build_decoder(spec, torch.float32, device, ops=FormatOps(plain))
    for name, parameter in decoder.named_parameters():
        view_numbers(parameter.data).copy_(state[name])
    return decoder


def count_reference_bytes(decoder: RankModel) -> int:
    """Counts the bytes that a model's reference needs."""
    parameters = cast(nn.Module, decoder).parameters()
    return SPARE_BYTES + sum(each.numel() * (1 if each.itemsize == 1 else 4) for each in parameters)


@dataclass(slots=True, frozen=True)
class Difference:
    """Of logits from others. rms, largest: in standard deviations of the others. divergence: KL, from the others."""

    rms: float
    largest: float
    divergence: float
    same: float

    def describe(self) -> str:
        return (
            f"rms {self.rms:.2e} std, largest {self.largest:.2e} std, KL {self.divergence:.2e}, "
            f"same argmax {self.same:.2%}"
        )


def compare(logits: Tensor, others: Tensor, device: torch.device | None = None) -> Difference:
    """Compares logits [..., vocab], in float64, on a device; None: where they are."""
    rows = zip(
        torch.split(logits.flatten(0, -2), ROWS_AT_ONCE), torch.split(others.flatten(0, -2), ROWS_AT_ONCE), strict=True
    )
    largest = squares = total = total_squares = divergence = same = 0.0
    for ours, theirs in rows:
        x, reference = ours.to(device).double(), theirs.to(device).double()
        difference = x - reference
        assert bool(difference.isfinite().all()), "logits are not finite"
        largest = max(largest, float(difference.abs().max()))
        squares += float(difference.square().sum())
        total += float(reference.sum())
        total_squares += float(reference.square().sum())
        divergence += float(F.kl_div(x.log_softmax(-1), reference.log_softmax(-1), reduction="sum", log_target=True))
        same += float((x.argmax(-1) == reference.argmax(-1)).sum())
    number, num_rows = logits.numel(), logits.numel() // logits.shape[-1]
    deviation = max(total_squares / number - (total / number) ** 2, 0.0) ** 0.5
    return Difference(
        (squares / number) ** 0.5 / deviation, largest / deviation, divergence / num_rows, same / num_rows
    )


@torch.inference_mode()
def sample_weights(decoder: RankModel) -> dict[str, Tensor]:
    """Returns some rows of what each tensor of the first layer stands for."""
    found = {}
    for name, part in cast(Any, decoder).parts():
        if name.startswith(SAMPLED_LAYER):
            _, values = next(part.read())
            found[name] = values[:SAMPLED_ROWS].float().cpu()
    return found


def check_weights(ours: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Returns the largest root mean square of a sampled tensor's difference, relative to the tensor.

    Raises ModelError where the weights are other ones.
    """
    errors = {name: float((ours[name] - other).norm() / other.norm()) for name, other in others.items()}
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > LARGEST_ERROR:
        raise ModelError(f"{worst} differs by {errors[worst]:.2f} of its size: the models have other weights")
    return errors[worst]


def cut_layers(model_dir: Path, num_layers: int, folder: Path) -> Path:
    """Makes a folder of the same model with its first layers only."""
    folder.mkdir(exist_ok=True)
    fields = json.loads((model_dir / "config.json").read_text("utf-8"))
    fields["num_hidden_layers"] = num_layers
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:num_layers]
    for path in model_dir.resolve().iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(fields), "utf-8")
    return folder


def make_config(options: argparse.Namespace, quantize: str, folder: Path) -> Config:
    """Makes the configuration of a rank just large enough; other values than these are the user's."""
    num_rows, width = options.prompts, -(-options.tokens // options.chunks)
    has_gpu = torch.cuda.is_available() and "model.device=cpu" not in options.overrides
    config = load_config(
        overrides=[
            "cache.num_tokens=16384",
            f"schedule.max_seqs={max(num_rows, FEW_ROWS)}",
            f"schedule.max_tokens={max(num_rows * width, 256)}",
            "graphs.enabled=false",
            f"attention.backend={'triton' if has_gpu else 'auto'}",  # others may have to be compiled
            *options.overrides,
            f"model.quantize={quantize}",
            "cache.dtype=auto",
        ]
    )
    if not options.layers:
        return config
    model_dir = resolve_model(config.model.path, weights=config.model.load == "weights")
    path = str(cut_layers(model_dir, options.layers, folder / "model"))
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


@dataclass(slots=True, frozen=True)
class Rank:
    """A model as it is served. spec: of the rank's layers. ops: what its layers compute with."""

    decoder: RankModel
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    limits: RankLimits
    ops: Ops


def build_rank(config: Config) -> Rank:
    """Builds a model and measures its kernels, as a start does."""
    model_dir = resolve_model(config.model.path, weights=config.model.load == "weights")
    spec = read_model(model_dir, config.model, config.parallel)
    if spec.impl != "native" or spec.recurrences or len(spec.attention_kinds) > 1:
        raise ModelError("measured are models of our own code, whose layers all have attention of one kind")
    factory = RunnerFactory(model_dir, spec, config, stages=StartupProgress())
    factory.build()
    assert factory.decoder is not None
    return Rank(factory.decoder, factory.rank_spec, factory.dtype, factory.device, factory.limits, factory.ops)


class Report:
    """Prints comparisons of one model's logits, by prompts and decoded tokens."""

    def __init__(self, name: str, text: Text, device: torch.device) -> None:
        self._name = name
        self._num_prompt = text.num_prompt
        self._device = device
        self._began = time.monotonic()

    def show(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began:.0f} s] {self._name}: {what}", flush=True)

    def compare(self, stored: str, against: str, logits: Tensor, others: Tensor, before: Tensor | None = None) -> None:
        """before: others that were compared with; where these are the same, nothing is printed."""
        for phase, part in (("prompts", slice(self._num_prompt)), ("decoded", slice(self._num_prompt, None))):
            if before is not None and torch.equal(before[:, part], others[:, part]):
                continue
            difference = compare(logits[:, part], others[:, part], self._device)
            print(f"{self._name}, cache {stored}, {phase} against {against}: {difference.describe()}", flush=True)


def measure(options: argparse.Namespace, quantize: str, folder: Path) -> None:
    """Measures one format. The unquantized model's logits are kept in the folder."""
    torch.set_float32_matmul_precision("highest")
    config = make_config(options, quantize, folder)
    name = Path(load_config(overrides=options.overrides).model.path).name
    name += f" ({options.layers} layers)" if options.layers else ""
    began = time.monotonic()
    print(f"{name}, {FORMATS[quantize]}: building", flush=True)
    rank = build_rank(config)
    gc.collect()  # the runner, with its cache
    spec, device, limits = rank.spec, rank.device, rank.limits
    text = make_text(spec.vocab_size, options.prompts, options.tokens, options.chunks, options.steps)
    dtype = str(rank.dtype).removeprefix("torch.")
    report = Report(f"{name}, {dtype if quantize == 'none' else FORMATS[quantize]}", text, device)
    report.show(f"built in {time.monotonic() - began:.0f} s")
    plain, logits = watch_inputs(rank.ops), {}
    for stored in options.caches:
        choice = AttentionChoice(config.attention.backend, stored, config.cache.page_size, limits)
        logits[stored] = compute_logits(rank.decoder, spec, rank.dtype, choice, text)
    report.show("computed")
    compare_unquantized(quantize, folder, report, logits, sample_weights(rank.decoder))
    if options.no_reference:
        return
    needed = count_reference_bytes(rank.decoder)
    if device.type == "cuda" and needed > (memory := torch.cuda.get_device_properties(device).total_memory):
        report.show(f"the reference needs {needed / 1e9:.0f} GB of {memory / 1e9:.0f} and is left out; use --layers")
        return
    state = take_state(rank.decoder)
    del rank
    free_memory(device, report)
    references = {"the format": PlainInputs()}
    if quantize == "none":
        references = {"its weights in float32": PlainInputs(all=True)}
    elif plain.all or plain.seen:
        references["the format with inputs quantized as here"] = plain
    before: dict[str, Tensor] = {}
    for against, inputs in references.items():
        reference = build_reference(spec, state, inputs, device)
        for stored in options.caches:
            choice = AttentionChoice("reference", stored, config.cache.page_size, limits)
            with sdpa_kernel(SDPBackend.MATH):
                others = compute_logits(reference, spec, torch.float32, choice, text)
            report.compare(stored, against, logits[stored], others, before.get(stored))
            before[stored] = others
        del reference
        free_memory(device, report)
    report.show("done")


def free_memory(device: torch.device, report: Report) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        report.show(f"the GPU's memory: {peak / 1e9:.1f} GB at most, {left / 1e9:.1f} GB now")
        torch.cuda.reset_peak_memory_stats(device)


def compare_unquantized(
    quantize: str, folder: Path, report: Report, logits: dict[str, Tensor], weights: dict[str, Tensor]
) -> None:
    """Compares with the logits that the unquantized model left in the folder, or leaves them there."""
    kept = folder / "unquantized.pt"
    if quantize == "none" and "auto" in logits:
        torch.save({"logits": logits["auto"], "weights": weights}, kept)
    if not kept.exists():
        report.show("nothing is known of the unquantized model; measure the format none with cache auto first")
        return
    unquantized = torch.load(kept)
    error = check_weights(weights, unquantized["weights"])
    report.show(f"weights of the first layer differ by at most {error:.2e} of a matrix from the unquantized ones")
    for stored, ours in logits.items():
        if (quantize, stored) != ("none", "auto"):
            report.compare(stored, "the unquantized model", ours, unquantized["logits"])


def take_names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Makes a parser of an option's names, in the order in which they are known."""

    def take(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected {', '.join(known)}, got {name}")
        return [name for name in known if name in names]

    return take


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--formats", type=take_names(FORMATS), default=[*FORMATS], metavar="NAME,…", help="of model.quantize"
    )
    parser.add_argument("--caches", type=take_names(CACHES), default=[*CACHES], metavar="NAME,…", help="of cache.dtype")
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="computed side by side; default: 4")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of a prompt; default: 128")
    parser.add_argument("--chunks", type=int, default=2, metavar="N", help="of a prompt; default: 2")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="decoded behind a prompt; default: 16")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="of the model, from the first; default: all")
    parser.add_argument("--no-reference", action="store_true", help="compare with the unquantized model only")
    parser.add_argument("--folder", type=Path, help="keeps the unquantized model's logits for later calls")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration of the rank")
    options = parser.parse_intermixed_args()
    if min(options.prompts, options.steps, options.chunks) < 1 or options.tokens < options.chunks:
        parser.error("expected 1 or more prompts, steps, chunks, and tokens of each chunk")
    try:
        load_config(overrides=options.overrides)
    except ConfigError as error:
        parser.error(str(error))
    # The processes take these over before they load torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    processes, failed = multiprocessing.get_context("spawn"), []
    with TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as name:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for quantize in options.formats:
            process = processes.Process(target=measure, args=(options, quantize, folder))
            process.start()
            process.join()
            if process.exitcode:
                failed.append(quantize)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
