"""The least seconds of a load on one device: of each step, as a scheduler without any delay would fill it.

    python scripts/compute_floor.py MODEL --samples 4 512 128 --prompt-tokens 700 --max-seqs 2048
    python scripts/compute_floor.py MODEL --trace AzureLLMInferenceTrace_conv.csv --requests 1024 --max-seqs 1024

A step takes its matrices (reading them, or multiplying with them: what takes longer), attention (reading keys and
values, or multiplying), states of recurrent layers (reading and writing them), and writing logits once. Decoding rows
come first, prompts fill the step up. Samples share their prompts. Matrices and keys are of 16 bits. MODEL is a
directory with a config.json.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from toka_async.arrays import Int64
from toka_async.bench.loads.trace import Lengths, read_trace
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.checkpoint.spec import ModelSpec, read_spec

ITEMSIZE = 2
PARTS = ("matrices", "head", "states", "keys", "prompts")


@dataclass(slots=True)
class Total:
    """Seconds by part of a step, and the number of steps."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_steps: int = 0

    def add(self, seconds: Iterable[float]) -> None:
        for name, each in zip(PARTS, seconds, strict=True):
            self.seconds[name] += each
        self.num_steps += 1


class StepFloor:
    """Least seconds of parts of a step. flops, bandwidth: of the device, per second."""

    def __init__(self, spec: ModelSpec, flops: float, bandwidth: float) -> None:
        self._spec = spec
        self._flops, self._bandwidth = flops, bandwidth
        self._matrices = [each for layer in range(spec.num_layers) for each in spec.list_matrices(layer)]
        self.multiply = cache(self._multiply_all)

    def _multiply_all(self, num_tokens: int) -> float:
        return sum(self._multiply(matrix, num_tokens) for matrix in self._matrices)

    def _multiply(self, matrix: MatrixSpec, num_tokens: int) -> float:
        num_bytes = matrix.count_read_bytes(num_tokens, ITEMSIZE)
        return max(num_bytes / self._bandwidth, matrix.count_flops(num_tokens) / self._flops)

    def sample(self, num_rows: int) -> float:
        """Products of the head, and logits."""
        logits = num_rows * self._spec.vocab_size * ITEMSIZE / self._bandwidth
        return self._multiply(self._spec.head_matrix, num_rows) + logits if num_rows else 0.0

    def keep_states(self, num_seqs: int, num_tokens: int) -> float:
        """States of so many sequences, read and written, which so many tokens change."""
        spec = self._spec
        flops = num_tokens * sum(each.count_flops() for each in spec.recurrences)
        return max(2 * num_seqs * spec.count_state_bytes(ITEMSIZE) / self._bandwidth, flops / self._flops)

    def read_keys(self, contexts: Int64) -> float:
        """Keys and values of decoding rows, int64 [r], none shared."""
        num_bytes = sum(
            int(np.minimum(contexts, each.window or contexts).sum()) * each.cached_values * ITEMSIZE
            for each in self._spec.all_attentions
        )
        return num_bytes / self._bandwidth

    def attend(self, num_queries: int, first: int) -> float:
        """Queries of one sequence from its token `first` on, to all tokens before them and themselves."""
        return sum(self._attend(each, num_queries, first) for each in self._spec.all_attentions)

    def _attend(self, attention: AttentionSpec, num_queries: int, first: int) -> float:
        seen = first + np.arange(1, num_queries + 1)
        num_pairs = int(np.minimum(seen, attention.window or seen).sum())
        flops = 4 * num_pairs * attention.num_heads * attention.head_dim
        return max(flops / self._flops, num_queries * attention.cached_values * ITEMSIZE / self._bandwidth)

    def share_prefix(self, num_rows: int, length: int) -> float:
        """Queries of decoding rows to a prefix that they share."""
        return sum(
            4 * num_rows * min(length, each.window or length) * each.num_heads * each.head_dim / self._flops
            for each in self._spec.all_attentions
        )


def run_trace(floor: StepFloor, requests: Lengths, max_seqs: int, max_tokens: int) -> Total:
    waiting, total = deque(requests), Total()
    contexts, left = np.empty(0, np.int64), np.empty(0, np.int64)  # of decoding rows
    begun = 0  # tokens of the first waiting prompt that are computed
    while waiting or contexts.size:
        room, joined = max_tokens - contexts.size, Lengths()
        chunks: list[tuple[int, int]] = []  # tokens, and the first one's place in its prompt
        while room and waiting and contexts.size + len(joined) < max_seqs:
            length = waiting[0][0]
            count = min(length - begun, room)
            chunks.append((count, begun))
            room, begun = room - count, begun + count
            if begun == length:
                joined.append(waiting.popleft())
                begun = 0
        num_prompt = sum(count for count, _ in chunks)
        num_tokens = contexts.size + num_prompt
        total.add(
            (
                floor.multiply(num_tokens),
                floor.sample(contexts.size + len(joined)),
                floor.keep_states(contexts.size + len(chunks), num_tokens),
                floor.read_keys(contexts),
                sum(floor.attend(*chunk) for chunk in chunks),
            )
        )
        contexts = np.concatenate([contexts + 1, [length + 1 for length, _ in joined]]).astype(np.int64)
        left = np.concatenate([left - 1, [num_output - 1 for _, num_output in joined]]).astype(np.int64)
        contexts, left = contexts[left > 0], left[left > 0]
    return total


def run_samples(floor: StepFloor, args: argparse.Namespace) -> Total:
    num_prompts, num_samples, num_tokens = args.samples
    num_rows, total = num_prompts * num_samples, Total()
    for _ in range(num_prompts):
        total.add((floor.multiply(args.prompt_tokens), 0.0, 0.0, 0.0, floor.attend(args.prompt_tokens, 0)))
    while num_rows > 0:  # as many at once as there may be
        at_once = min(num_rows, args.max_seqs)
        for own in range(num_tokens):
            keys = floor.read_keys(np.full(at_once, own, np.int64)) + floor.share_prefix(at_once, args.prompt_tokens)
            states = floor.keep_states(at_once, at_once)
            total.add((floor.multiply(at_once), floor.sample(at_once), states, keys, 0.0))
        num_rows -= at_once
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--samples", type=int, nargs=3, metavar=("PROMPTS", "SAMPLES", "TOKENS"))
    load.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=1024, help="of the trace")
    parser.add_argument("--prompt-tokens", type=int, default=700, help="of each prompt with samples")
    parser.add_argument("--max-seqs", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--state-dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tflops", type=float, default=674.0)
    parser.add_argument("--gb-s", type=float, default=4300.0)
    args = parser.parse_args()
    spec = read_spec(args.model).store_states(args.state_dtype)
    floor = StepFloor(spec, args.tflops * 1e12, args.gb_s * 1e9)
    if args.samples:
        num_prompts, num_samples, num_tokens = args.samples
        total, num_output = run_samples(floor, args), num_prompts * num_samples * num_tokens
    else:
        requests = read_trace(args.trace, args.requests)
        total = run_trace(floor, requests, args.max_seqs, args.max_tokens)
        num_output = sum(each for _, each in requests)
    seconds = sum(total.seconds.values())
    parts = ", ".join(f"{name} {each:.2f}" for name, each in total.seconds.items())
    print(f"{seconds:.2f} s, {num_output / seconds:.0f} output tokens/s in {total.num_steps} steps: {parts}")


if __name__ == "__main__":
    main()
