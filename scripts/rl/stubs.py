"""Stands in for packages that a trainer's client imports and does not need for what is tried here."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Stub(ModuleType):
    """A package with any class that is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"model_validate_json": staticmethod(read_object), "__class_getitem__": lambda _: object})


class StubFinder(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        is_meant = any(name == each or name.startswith(f"{each}.") for each in self._names)
        return ModuleSpec(name, self, is_package=True) if is_meant else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def read_object(text: bytes) -> Any:
    """Reads JSON as an object with attributes, in place of pydantic's models."""
    import json
    from types import SimpleNamespace

    return SimpleNamespace(**json.loads(text))


def stand_in_for(*names: str) -> None:
    """From now on these packages, and all below them, are stubs."""
    sys.meta_path.insert(0, StubFinder(names))
