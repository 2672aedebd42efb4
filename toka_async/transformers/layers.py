"""Finds the parts of a foreign model: its decoder, its layers, and its modules by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from toka_async.transformers.loading import refuse


def find_path(model: nn.Module, module: nn.Module | None) -> str:
    """Returns the name of a module in a model; empty: it has no such module."""
    return next((path for path, each in model.named_modules() if each is module), "")


def find_decoder(model: Any) -> tuple[Any, str]:
    """Returns what computes hidden states of ids, and its name. Raises ModelError."""
    decoder = model.get_decoder()
    path = find_path(model, decoder)
    if not path:
        raise refuse(model.config, "its head is no module of its own")
    return decoder, path


def find_layers(model: nn.Module, attentions: list[str]) -> nn.ModuleList:
    """Returns the list of layers. attentions: the names of the modules that attend, in order.

    Raises ModelError unless each layer has one of them.
    """
    first, *_ = attentions
    names = first.split(".")
    for end in range(1, len(names)):
        layers = model.get_submodule(".".join(names[:end]))
        if isinstance(layers, nn.ModuleList):
            own = [name.split(".")[end] for name in attentions]
            if own == [str(number) for number in range(len(layers))]:
                return layers
    raise refuse(getattr(model, "config", None), "its layers are not in one list")


def replace(model: nn.Module, path: str, module: nn.Module | None) -> None:
    """Puts a module into the place of the one of that name."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def list_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of a module that a checkpoint has."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
