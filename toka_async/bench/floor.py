"""The least time of a step on a device: its matrices, and what it must read, at rates measured there.

The floor is the sum of the model's matrices (reading them, or multiplying with them at the rate of large ones: what
takes longer), attention (likewise, a group's prefix read once), of recurrent layers reading and writing the rows'
states, and reading the logits once. Beside it stands what the matrices take as torch multiplies at the step's number of
tokens, which with few tokens is longer than to read them.
Knows shapes; knows no kernels and no steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch.nn import functional

from toka_async.bench.step_load import Case
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.delta_net_spec import DeltaNetSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.checkpoint.quantization import FORMATS
from toka_async.checkpoint.spec import ModelSpec

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
LARGE = {"cuda": 8192, "cpu": 256}  # tokens
LEAST_SECONDS = 0.01  # length of a measurement
REPEATS = 5


@dataclass(frozen=True, slots=True)
class FloorParts:
    """Seconds of a step. states: of its recurrent layers. by_torch: of its matrices, as torch multiplies."""

    matrices: float
    attention: float
    states: float
    sampling: float
    by_torch: float

    @property
    def total(self) -> float:
        return self.matrices + self.attention + self.states + self.sampling

    @property
    def total_by_torch(self) -> float:
        return self.by_torch + self.attention + self.states + self.sampling


class Floor:
    """Measures a device and computes floors.

    bandwidth: bytes per second, read and written, of a large copy. flops: per second, of large products in the model's
    dtype. quantized_flops: of 8-bit floats, if the model's weights are, on a GPU.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, stored: torch.dtype, device: torch.device) -> None:
        """stored: what keys and values are stored as."""
        self._spec, self._dtype, self._stored, self._device = spec, dtype, stored, device
        self._seconds: dict[tuple[int, int, int, bool], float] = {}
        source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        self.bandwidth = 2 * source.numel() / count_seconds(lambda: target.copy_(source), device)
        largest = max(spec.list_matrices(0), key=lambda matrix: matrix.count_flops(1))
        self.flops = self._measure_flops(msgspec.structs.replace(largest, format="dense"))
        self.quantized_flops = self._measure_flops(largest)

    def _measure_flops(self, matrix: MatrixSpec) -> float:
        num_tokens = LARGE[self._device.type]
        return matrix.count_flops(num_tokens) / self._time_torch(num_tokens, matrix)

    def compute(self, case: Case, grouped: bool) -> FloorParts:
        """grouped: each group's prefix is read once, not once a row."""
        spec, num_sampled = self._spec, case.rows or 1
        layers = [matrix for layer in range(spec.num_layers) for matrix in spec.list_matrices(layer)]
        products = [*((case.num_tokens, matrix) for matrix in layers), (num_sampled, spec.head_matrix)]
        return FloorParts(
            matrices=sum(self._multiply(*product) for product in products),
            attention=sum(self._attention(case, grouped, attention) for attention in spec.all_attentions),
            states=sum(self._recurrence(case, recurrence) for recurrence in spec.recurrences),
            sampling=num_sampled * spec.vocab_size * self._dtype.itemsize / self.bandwidth,
            by_torch=sum(self._time_torch(*product) for product in products),
        )

    def _multiply(self, num_tokens: int, matrix: MatrixSpec) -> float:
        """Returns the least seconds of a product of so many tokens: of reading the weights, or of multiplying."""
        num_bytes = matrix.count_read_bytes(num_tokens, self._dtype.itemsize)
        flops = self.quantized_flops if matrix.format in FORMATS else self.flops
        return max(num_bytes / self.bandwidth, matrix.count_flops(num_tokens) / flops)

    def _time_torch(self, num_tokens: int, matrix: MatrixSpec) -> float:
        """Measures the seconds of the products by torch, one after the other; of quantized values without scales."""
        num_products, num_rows = matrix.list_products(num_tokens)
        quantized = matrix.format in FORMATS and self._device.type == "cuda"
        key = (num_rows, matrix.num_outputs, matrix.num_inputs, quantized)
        if key not in self._seconds:
            inputs = torch.randn(num_rows, matrix.num_inputs, dtype=self._dtype, device=self._device)
            weight = torch.randn(matrix.num_outputs, matrix.num_inputs, dtype=self._dtype, device=self._device)
            multiply = partial(functional.linear, inputs, weight)
            if quantized:
                one = torch.ones((), device=self._device)
                values, transposed = inputs.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
                multiply = partial(torch._scaled_mm, values, transposed, one, one, out_dtype=self._dtype)
            with torch.inference_mode():
                self._seconds[key] = count_seconds(multiply, self._device)
        return num_products * self._seconds[key]

    def _attention(self, case: Case, grouped: bool, attention: AttentionSpec) -> float:
        """Returns the seconds of one layer."""
        window, bytes_each = attention.window, attention.cached_values * self._stored.itemsize
        flops_each = 4 * attention.num_heads * attention.head_dim  # both products of a query and a key
        if case.prompt:
            seen = min(case.prompt, window or case.prompt)
            num_pairs = seen * (seen + 1) / 2 + (case.prompt - seen) * seen
            return max(case.prompt * bytes_each / self.bandwidth, num_pairs * flops_each / self.flops)
        seen = min(case.context, window or case.context)
        own = min(seen, case.context - case.prefix) if grouped else seen
        prefix = seen - own
        own_bytes, prefix_bytes = case.rows * own * bytes_each, case.groups * prefix * bytes_each
        prefix_flops = case.rows * prefix * flops_each
        return own_bytes / self.bandwidth + max(prefix_bytes / self.bandwidth, prefix_flops / self.flops)

    def _recurrence(self, case: Case, recurrence: DeltaNetSpec) -> float:
        """Returns the seconds of one layer with a state: each row's is read and written once, whatever its context."""
        num_bytes = 2 * (case.rows or 1) * recurrence.count_state_bytes(self._dtype.itemsize)
        flops = case.num_tokens * recurrence.count_flops()
        return max(num_bytes / self.bandwidth, flops / self.flops)


def count_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of a call, over runs that are long enough to be timed."""
    work()
    count = 1
    while (took := _time(work, count, device)) < LEAST_SECONDS:
        count = max(2 * count, int(1.2 * count * LEAST_SECONDS / max(took, 1e-6)))
    return statistics.median(_time(work, count, device) for _ in range(REPEATS)) / count


def _time(work: Callable[[], object], count: int, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
