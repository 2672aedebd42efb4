"""Divides the matrices of a foreign model among tensor ranks, as the model's own plan says.

A plan names a style for modules and parameters. Column-parallel ones hold some of the outputs, row-parallel ones some
of the inputs, and their partial results are summed over ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toka_async.checkpoint.json_file import ModelError
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.matrices.share import Share, share_of, whole_of
from toka_async.transformers.loading import refuse

UNDIVIDED = ("replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise", "local_params")
SUMMED = ("moe_tp_experts", "all_reduce")  # of modules whose parameters are divided


@dataclass(slots=True)
class Division:
    """Which part of its parameters a rank has: shares of a tensor's dimensions, by the module's identity and name.

    packed: parameters whose share consists of as many pieces as the checkpoint has tensors for it.
    """

    shares: dict[tuple[int, str], tuple[Share, ...]] = field(default_factory=dict)
    packed: set[tuple[int, str]] = field(default_factory=set)

    def find(self, module: nn.Module, name: str, values: Tensor) -> tuple[Share, ...]:
        whole = tuple(whole_of(size) for size in values.shape)
        return self.shares.get((id(module), name), whole)


def divide(model: Any, comm: Comm, skip: tuple[str, ...] = ()) -> Division:
    """Replaces parameters, which are on the meta device, by a rank's parts. Raises ModelError if there is no plan.

    skip: names of modules that are divided otherwise.
    """
    division = Division()
    if comm.size == 1:
        return division
    plan: dict[str, str] = model.tp_plan or {}
    if not any(style.startswith(("colwise", "rowwise")) for style in plan.values()):
        raise _refuse(model, comm, "the model has no plan for tensor ranks")
    for path, module in list(model.named_modules()):
        if path in skip:
            continue
        _apply(model, module, path, plan.get(_generalize(path)), comm, division)
        for name, parameter in list(module.named_parameters(recurse=False)):
            style = plan.get(_generalize(f"{path}.{name}"))
            if style is not None:
                _divide_parameter(model, module, f"{path}.{name}", parameter, style, comm, division)
    return division


def _apply(model: Any, module: Any, path: str, style: str | None, comm: Comm, division: Division) -> None:
    if style is None or style in UNDIVIDED:
        return
    if style in SUMMED:
        compute = module.forward
        module.forward = lambda *inputs, **named: comm.all_reduce(compute(*inputs, **named))
        return
    if type(module) is not nn.Linear:
        raise _refuse(model, comm, f"{path} ({type(module).__name__}) cannot be divided ({style})")
    linear: Any = module
    outputs, inputs = linear.out_features, linear.in_features
    match style:
        case "colwise" | "colwise_gather_output" | "colwise_rep":
            rows = _share(model, outputs, path, comm)
            _set_part(module, division, "weight", (rows, whole_of(inputs)))
            if linear.bias is not None:
                _set_part(module, division, "bias", (rows,))
            if style != "colwise":
                linear.forward = lambda x: comm.all_gather(F.linear(x, linear.weight, linear.bias), 2)
        case "rowwise" | "rowwise_split_input" | "rowwise_rep":
            columns = _share(model, inputs, path, comm)
            _set_part(module, division, "weight", (whole_of(outputs), columns))
            own = slice(None) if style == "rowwise" else columns.indices

            def forward(x: Tensor) -> Tensor:
                total = comm.all_reduce(F.linear(x[..., own], linear.weight))
                return total if linear.bias is None else total + linear.bias

            linear.forward = forward
        case _:
            raise _refuse(model, comm, f"{path} has the style {style!r}")


def _divide_parameter(
    model: Any, module: Any, path: str, values: Tensor, style: str, comm: Comm, division: Division
) -> None:
    """Divides a stack of experts' matrices [experts, outputs, inputs], or numbers of heads [heads]."""
    name = path.rpartition(".")[2]
    if style in UNDIVIDED:
        return
    whole = [whole_of(size) for size in values.shape]
    if values.dim() == 1 and style == "colwise":
        _set_part(module, division, name, (_share(model, len(values), path, comm),))
        return
    if values.dim() != 3 or style not in ("packed_colwise", "colwise", "rowwise"):
        raise _refuse(model, comm, f"{path} of {values.dim()} dimensions has the style {style!r}")
    dim = 2 if style == "rowwise" else 1
    whole[dim] = _share(model, values.shape[dim] // (2 if style == "packed_colwise" else 1), path, comm)
    if style == "packed_colwise":
        whole[dim] = whole[dim].times(2)
        division.packed.add((id(module), name))
    _set_part(module, division, name, tuple(whole))


def _set_part(module: nn.Module, division: Division, name: str, shares: tuple[Share, ...]) -> None:
    dtype = getattr(module, name).dtype
    values = torch.empty([share.size for share in shares], dtype=dtype, device="meta")
    setattr(module, name, nn.Parameter(values, requires_grad=False))
    division.shares[id(module), name] = shares


def _share(model: Any, total: int, path: str, comm: Comm) -> Share:
    if total % comm.size:
        raise _refuse(model, comm, f"{path} has {total} values, which cannot be divided so")
    return share_of(total, comm)


def _generalize(path: str) -> str:
    """Names all layers' modules of that kind, as plans do: "layers.*.mlp"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _refuse(model: Any, comm: Comm, reason: str) -> ModelError:
    return refuse(model.config, f"parallel.tp={comm.size}: {reason}; use 1")


class TraceComm(LocalComm):
    """A rank of several, none of which is there: for shapes on the meta device."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim)
