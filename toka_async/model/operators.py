"""Functions as operators of torch, which compilers do not look into: a call is one node of a graph.

Knows nothing of what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

_NAMESPACE = "toka_async"


class Operators:
    """Operators that live as long as this. They change no argument, and return no view of one."""

    def __init__(self) -> None:
        library: Any = torch.library.Library
        self._library = library(_NAMESPACE, "FRAGMENT")

    def add(
        self, name: str, signature: str, run: Callable[..., Any], shape_only: Callable[..., Any]
    ) -> tuple[str, Callable[..., Any]]:
        """The operator's name in this process, and the operator.

        Names are numbered, not random: they are part of the key of what a compiler keeps on disk.

        Args:
            signature: `(Tensor x, int n) -> Tensor`, as torch's schemas have it.
            shape_only: the same arguments to an output of the right shape and dtype.
        """
        ops = getattr(torch.ops, _NAMESPACE)
        numbered = next(each for each in map(f"{name}_{{}}".format, count()) if not hasattr(ops, each))
        self._library.define(f"{numbered}{signature}", tags=(torch.Tag.needs_exact_strides,))
        self._library.impl(numbered, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{numbered}", shape_only, lib=self._library)
        return numbered, getattr(ops, numbered).default
