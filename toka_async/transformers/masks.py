"""Finds out which tokens a model's mask lets a token see, by asking the mask's function for some positions.

A paged cache can only have masks of this kind: a token sees itself and all before it, or the last `window` of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Positions of queries that are asked for: no window is larger than the last one and smaller than a context.
POSITIONS = (0, 1, 5, 64, 1000, 4100, 20000, 140000)

MaskFunction = Callable[..., Any]  # of batch, head, query and key: whether the query sees the key


def measure_window(function: MaskFunction, positions: tuple[int, ...] = POSITIONS) -> int | None:
    """Returns how many positions a token sees, itself included; 0: all before it. None: the mask is of another kind."""
    window = 0
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    for query in positions:
        keys = torch.arange(query + 3, device="cpu")
        with torch.device("cpu"):
            seen = function(zero, zero, zero + query, keys).expand(keys.shape).nonzero().flatten()
        count = len(seen)
        if not count or int(seen[-1]) != query or int(seen[0]) != query - count + 1:
            return None
        if window and count != window:
            return None
        if count <= query:
            window = count
    return window
