"""The results of `bench step`, as they are printed and drawn."""

from __future__ import annotations

import msgspec


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A case and its median step, in milliseconds.

    sampling: what `asking` of the rows ask for. ms: time between results. device_ms: time that the rank measures.
    floor_ms: the sum of its four parts. share: floor_ms / ms. torch_ms, torch_share: the same with matrices as torch
    multiplies them.
    """

    rows: int
    context: int
    prefix: int
    groups: int
    prompt: int
    sampling: str
    asking: int
    ms: float
    device_ms: float
    tokens_per_second: float
    floor_ms: float
    matrices_ms: float
    attention_ms: float
    states_ms: float
    sampling_ms: float
    share: float
    torch_ms: float
    torch_share: float


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """bandwidth_gb_s: of a large copy, read and written. matrix_tflops: of the largest matrices. skipped: reasons.

    state_bytes: what a row keeps in recurrent layers.
    """

    model: str
    device: str
    dtype: str
    cache_tokens: int
    state_bytes: int
    bandwidth_gb_s: float
    matrix_tflops: float
    steps: list[StepTime]
    skipped: list[str]
