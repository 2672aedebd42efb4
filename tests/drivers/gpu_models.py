"""Checkpoints of real head sizes for tests on a GPU, what transformers makes of them, and an engine that is watched.

The weights are bfloat16, so that all of them are the same model: transformers and the engine, in float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cases.models import GEMMA4_SMALL, make_checkpoint
from tests.drivers.core import Sample
from tests.drivers.engine import Engine
from toka_async.arrays import as_i32
from toka_async.attention.base import PrefixGroup
from toka_async.messages import Step, StepDone
from toka_async.runner.inputs import SampledTokens, StepRows
from toka_async.runner.runner import Runner
from toka_async.runner.samples import Draws

DEVICE = "cuda"
VOCAB = 32_000
_COMMON = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 2048, "torch_dtype": "bfloat16"}


def _shape(hidden: int, heads: int, kv_heads: int, dim: int, inner: int) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return dict(zip(names, (hidden, heads, kv_heads, dim, inner), strict=True))


_GEMMA = {"sliding_window": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _shape(512, 8, 2, 64, 1408)),
    "qwen2": ("qwen2", _shape(896, 14, 2, 64, 2432) | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _shape(1024, 16, 2, 128, 2816)),
    "qwen3_moe": (
        "qwen3_moe",
        _shape(1024, 16, 2, 128, 2816) | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384},
    ),
    "mixtral": ("mixtral", _shape(1024, 8, 2, 128, 1408)),
    "mistral": ("mistral", _shape(1024, 8, 2, 128, 2816) | {"sliding_window": 256}),
    "gemma4": (
        "gemma4_text",
        _shape(1024, 4, 1, 256, 2816)
        | _GEMMA
        | GEMMA4_SMALL
        | {"global_head_dim": 512, "hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": VOCAB},
    ),
    "gemma2": ("gemma2", _shape(1024, 8, 4, 256, 2816) | _GEMMA),
    "gemma3_text": ("gemma3_text", _shape(1024, 8, 4, 256, 2816) | _GEMMA),
    "olmo3": ("olmo3", _shape(1024, 8, 8, 128, 2816) | {"head_dim": ..., "sliding_window": 256}),
    "gpt_oss": (
        "gpt_oss",
        _shape(1024, 16, 2, 64, 512) | {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128},
    ),
    "qwen3_5_text": ("qwen3_5_text", _shape(1024, 8, 2, 256, 2816) | _DELTA),
    "qwen3_next": (
        "qwen3_next",
        _shape(1024, 8, 2, 256, 2816)
        | _DELTA
        | {"num_experts": 16, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    ),
}
ROUTED = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next")  # have experts


def make_model(folder: Path, shape: str) -> Path:
    """A checkpoint of that shape."""
    family, overrides = SHAPES[shape]
    make_checkpoint(folder, family, seed=1, **(_COMMON | overrides))
    if overrides.get("tie_word_embeddings"):  # else every token's likeliest successor is itself
        tensors = load_file(folder / "model.safetensors")
        tensors["model.embed_tokens.weight"] *= overrides["hidden_size"] ** -0.5
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass(slots=True)
class Scores:
    """What transformers says of tokens, each given those before it; [t] each.

    logprobs, best: log-probs of the tokens and largest logits less the tokens' own, in float32. bf16_logprobs: in
    bfloat16. bf16_gaps: as `gaps`, of the tokens that bfloat16 finds best.
    """

    logprobs: Tensor
    gaps: Tensor
    bf16_logprobs: Tensor
    bf16_gaps: Tensor


@dataclass(slots=True)
class Reference:
    """A checkpoint in transformers, in float32 and bfloat16."""

    folder: Path
    exact: Any
    rounded: Any
    known: dict[tuple[int, ...], Scores] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Reference:
        # Written out in float32, as its definition has it; in bfloat16 as transformers computes by default.
        exact: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        rounded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return cls(folder, exact.to(DEVICE).eval(), rounded.to(DEVICE).eval())

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Scores:
        """Of the tokens after a prompt."""
        ids = (*prompt, *token_ids)
        if ids not in self.known:
            chosen = torch.tensor(token_ids, device=DEVICE)[:, None]
            exact, rounded = (self.logits(model, ids, len(prompt)) for model in (self.exact, self.rounded))
            best = exact.amax(-1)
            scores = (
                exact.log_softmax(-1).gather(1, chosen)[:, 0],
                best - exact.gather(1, chosen)[:, 0],
                rounded.log_softmax(-1).gather(1, chosen)[:, 0],
                best - exact.gather(1, rounded.argmax(-1, keepdim=True))[:, 0],
            )
            self.known[ids] = Scores(*(values.cpu() for values in scores))
        return self.known[ids]

    @staticmethod
    def logits(model: Any, ids: Sequence[int], num_prompt: int) -> Tensor:
        """Float32 logits [t, vocab] that tell the tokens after the prompt."""
        logits: Tensor = model(torch.tensor([ids], device=DEVICE)).logits[0, num_prompt - 1 : -1]
        return logits.float()

    def score_all(self, samples: Sequence[tuple[Sequence[int], Sample]]) -> tuple[Scores, Tensor]:
        """The scores of (prompt, sample) one after the other, and the engine's log-probs of the same tokens."""
        parts = [self.score(prompt, sample.token_ids) for prompt, sample in samples]
        names = ("logprobs", "gaps", "bf16_logprobs", "bf16_gaps")
        scores = Scores(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
        return scores, torch.tensor([value for _, sample in samples for value in sample.logprobs])


class Watch:
    """Runs steps, and counts rows of steps in groups, graphs that are replayed, and those of them with groups.

    num_mixed: graphs of steps with prompts. num_chunked: of all steps, those with prompts.
    """

    def __init__(self, runner: Runner) -> None:
        self.num_grouped = self.num_replays = self.num_grouped_replays = self.num_mixed = self.num_chunked = 0
        self._runner = runner
        if runner.decode is not None:
            self._replay = runner.decode.replay
            runner.decode.replay = self._watched  # type: ignore[method-assign]
        if runner.mixed is not None:
            self._replay_mixed = runner.mixed.replay
            runner.mixed.replay = self._watched_mixed  # type: ignore[method-assign]

    def run(self, step: Step) -> StepDone:
        self.num_chunked += bool(step.chunk_slots)
        self.num_grouped += int(as_i32(step.group_rows).sum())
        return self._runner.run(step)

    def _watched(
        self,
        step_rows: StepRows,
        groups: tuple[PrefixGroup, ...],
        residuals: Tensor | None = None,
        before_draw: Callable[[], None] | None = None,
    ) -> tuple[Draws | None, Tensor | None]:
        self.num_replays += 1
        self.num_grouped_replays += bool(groups)
        return self._replay(step_rows, groups, residuals, before_draw)

    def _watched_mixed(
        self, step_rows: StepRows, groups: tuple[PrefixGroup, ...], residuals: Tensor | None = None
    ) -> tuple[Tensor, Tensor, SampledTokens]:
        self.num_mixed += 1
        return self._replay_mixed(step_rows, groups, residuals)


class WatchedEngine(Engine):
    """An engine on the GPU for steps of up to 32 rows, in graphs or not, with groups of two rows or none."""

    def __init__(self, folder: Path, dtype: str, *, grouped: bool, graphs: bool = True, **fields: Any) -> None:
        values = {
            "max_seqs": 32,
            "max_tokens": 512,
            "num_tokens": 16384,
            "group_min_seqs": 2 if grouped else 0,
            "group_min_tokens": 16,
            "max_graph_seqs": 32 if graphs else 0,
        }
        super().__init__(folder, device=DEVICE, dtype=dtype, **values | fields)
        self.driver.rank = self.watch = Watch(self.runner)
