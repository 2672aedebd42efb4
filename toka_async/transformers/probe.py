"""Watches a model compute a few tokens on the meta device, to learn what it asks of attention.

What a model does is known from this, not from its configuration: which modules attend, with which heads, scales and
masks. What our attention cannot do is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toka_async.transformers.architectures import PADDING
from toka_async.transformers.loading import ANY_FAILURE, refuse
from toka_async.transformers.masks import measure_window

PROBE = "toka_async_probe"
NUM_TOKENS = 5
# What models hand to attention beside queries, keys and values, and what has no part in the result here.
KNOWN = {"scaling", "softcap", "s_aux", "is_causal", "dropout", "position_ids", "use_cache", "sliding_window"}
KNOWN |= {"output_attentions", "output_router_logits", "cache_position", "return_dict"}


@dataclass(slots=True, frozen=True)
class AttentionCall:
    """How one layer calls attention.

    value_dim: of a value head, which may be smaller than the others. window: how many positions a token sees, 0: all
    before it. soft_cap: of scores, 0: none. sinks: each head has one.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int
    soft_cap: float
    sinks: bool


class _RefusedError(Exception):
    """Our attention cannot do what a model asks for."""


class AttentionProbe:
    """Stands for attention in models that are built with `PROBE` as theirs, while there is a probe."""

    def __init__(self) -> None:
        self._calls: list[AttentionCall] = []
        self._masks: list[Tensor] = []
        self._windows: dict[int, int | None] = {}  # of each mask, by its identity; None: it is of another kind
        ALL_ATTENTION_FUNCTIONS.register(PROBE, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, self._make_mask)

    def run(self, model: Any) -> list[AttentionCall]:
        """Returns how each layer calls attention, in order. Raises ModelError, which says why the model cannot run.

        model: with its head; it goes to the meta device.
        """
        config = model.config
        if not getattr(config, "is_causal", True):
            raise refuse(config, "its tokens see the tokens after them")
        if getattr(model, "_is_stateful", False):
            raise refuse(config, "its layers keep a state from token to token")
        if any(_skips_padding(module) for module in model.modules()):
            raise refuse(config, PADDING)
        self._calls, self._masks, self._windows = [], [], {}
        shape = 1, NUM_TOKENS
        try:
            model.to("meta")
            model.set_experts_implementation("batched_mm")  # others look at which tokens go to which expert
            with torch.inference_mode(), torch.device("meta"):
                model(
                    input_ids=torch.zeros(shape, dtype=torch.int64),
                    position_ids=torch.zeros(shape, dtype=torch.int64),
                    attention_mask=torch.ones(shape, dtype=torch.bool),  # without one, positions would be examined
                    use_cache=False,
                )
        except _RefusedError as error:
            raise refuse(config, str(error)) from None
        except ANY_FAILURE as error:
            reason = str(error).strip().partition("\n")[0]
            raise refuse(config, f"its code fails on a trial ({type(error).__name__}: {reason})") from None
        _check(config, self._calls)
        return self._calls

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Notes a call; the result has the shape of attention's. Raises _RefusedError."""
        unknown = sorted(name for name, value in others.items() if name not in KNOWN and value is not None)
        if unknown:
            raise _RefusedError(f"its attention takes {', '.join(unknown)}")
        num_heads, num_kv_heads, dim = query.shape[1], key.shape[1], query.shape[-1]
        alike = query.shape[0] == 1 and query.shape[2] == key.shape[2] == value.shape[2] == NUM_TOKENS
        if not alike or key.shape[-1] != dim or value.shape[1] != num_kv_heads or value.shape[-1] > dim:
            raise _RefusedError("its attention is not over the keys and values of the step's tokens")
        if num_heads % num_kv_heads:
            raise _RefusedError(f"its {num_heads} heads are no multiple of its {num_kv_heads} KV heads")
        scale, sinks = others.get("scaling"), others.get("s_aux")
        if sinks is not None and sinks.shape != (num_heads,):
            raise _RefusedError(f"its attention has sinks of the shape {list(sinks.shape)}, not one for each head")
        self._calls.append(
            AttentionCall(
                module=module,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=dim,
                value_dim=value.shape[-1],
                scale=dim**-0.5 if scale is None else float(scale),
                window=self._find_window(module, attention_mask, others.get("is_causal")),
                soft_cap=float(others.get("softcap") or 0.0),
                sinks=sinks is not None,
            )
        )
        return query.new_empty(1, NUM_TOKENS, num_heads, value.shape[-1]), None

    def _make_mask(
        self, batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Any], **_: Any
    ) -> Tensor:
        """Makes a mask that stands for what the function lets tokens see."""
        mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self._masks.append(mask)  # so that no other tensor has its identity
        self._windows[id(mask)] = measure_window(mask_function)
        return mask

    def _find_window(self, module: nn.Module, mask: Tensor | None, is_causal: bool | None) -> int:
        if mask is None:
            if not (getattr(module, "is_causal", False) if is_causal is None else is_causal):
                raise _RefusedError("its tokens see the tokens after them")
            return 0
        if id(mask) not in self._windows:
            raise _RefusedError("it makes attention masks of its own")
        window = self._windows[id(mask)]
        if window is None:
            raise _RefusedError("its tokens see others than all before them, or the last of these")
        return window


def _check(config: Any, calls: list[AttentionCall]) -> None:
    """Raises ModelError unless each layer attends once, over keys and values of one shape."""
    if not calls:
        raise refuse(config, "its code has no attention interface")
    if len({id(call.module) for call in calls}) < len(calls):
        raise refuse(config, "a layer attends several times")
    if len(calls) != config.num_hidden_layers:
        raise refuse(config, f"{len(calls)} times attention in {config.num_hidden_layers} layers")
    if len({(call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) for call in calls}) > 1:
        raise refuse(config, "its layers have heads of different numbers or sizes")
    if len({call.soft_cap for call in calls}) > 1:
        raise refuse(config, "its layers have different soft caps")
    if len({call.sinks for call in calls}) > 1:
        raise refuse(config, "some of its layers have sinks, and others have none")


def _skips_padding(module: nn.Module) -> bool:
    """Tells whether it numbers positions as RoBERTa does: padding has `padding_idx`, others count from the next on."""
    positions = getattr(module, "position_embeddings", None)
    return isinstance(positions, nn.Embedding) and positions.padding_idx is not None
