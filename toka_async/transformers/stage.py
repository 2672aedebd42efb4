"""Makes a foreign model one stage of a pipeline: other stages' layers pass on what they get, and have no parameters.

A stage's first layer takes the residual that comes in, whatever the model made of its embeddings; what leaves the last
one goes out, whatever the model makes of that. So only layers that take nothing else of each other can be divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from toka_async.checkpoint.division import StagePart
from toka_async.transformers.loading import refuse

HIDDEN = "hidden_states"


@dataclass(slots=True)
class StageResiduals:
    """The residuals [1, t, hidden] of a step: those that came in, and those that the stage's last layer made."""

    incoming: Tensor | None = None
    outgoing: Tensor | None = None


def cut_stage(layers: nn.ModuleList, part: StagePart) -> StageResiduals:
    """Leaves a stage's layers their parameters; others have none. Layers keep their places and attributes."""
    residuals = StageResiduals()
    for number, layer in enumerate(layers):
        if not part.first <= number < part.last:
            for name in list(layer._modules):
                setattr(layer, name, None)
            layer._parameters.clear()
            layer._buffers.clear()
            layer.forward = _pass_on
    if not part.is_first:
        _wrap(layers[part.first], residuals, takes=True)
    if not part.is_last:
        _wrap(layers[part.last - 1], residuals, takes=False)
    return residuals


def check_pipeline(model: Any, num_stages: int) -> None:
    """Raises ModelError unless the model's own plan says that layers hand only hidden states to each other."""
    plan = (getattr(model.config, "base_model_pp_plan", None) or {}).get("layers")
    if num_stages > 1 and (plan is None or list(plan[-1]) != [HIDDEN]):
        raise refuse(model.config, f"parallel.pp={num_stages}: the model has no plan for pipelines; use 1")


def _pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _wrap(layer: Any, residuals: StageResiduals, takes: bool) -> None:
    """Has a layer take the residual that came in, or keep the one that goes out."""
    compute = layer.forward

    def forward(hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        if takes:
            assert residuals.incoming is not None
            hidden_states = residuals.incoming
        output = compute(hidden_states, *others, **named)
        if not takes:
            residuals.outgoing = output if isinstance(output, Tensor) else output[0]
        return output

    layer.forward = forward
