"""Which tensors a model has, whichever part of them a rank holds: what an update may and must bring.

All ranks check alike, before any of them waits for a tensor. Knows names, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from toka_async.checkpoint.names import StoredPart, is_of_other_part, list_stored_parts
from toka_async.model.decoder import RankModel
from toka_async.transfer.tensors import TensorInfo

SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
FUSED = {
    "self_attn.qkv_proj": "self_attn.q_proj, self_attn.k_proj and self_attn.v_proj",
    "mlp.gate_up_proj": "mlp.gate_proj and mlp.up_proj",
}
HEAD = "lm_head.weight"


class UpdateError(Exception):
    """An update is refused or has failed; the message names the tensor."""


@dataclass(slots=True, frozen=True)
class Expected:
    """What a tensor must be. dtypes: as safetensors files name them."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class WeightCatalog:
    """The tensors of a whole model."""

    def __init__(self, model: RankModel) -> None:
        """model: all of it, on the meta device."""
        self._find_part = model.find_part
        self.tensors = {name: Expected(part.shape, part.dtypes) for name, part in model.parts()}
        self._found: dict[tuple[str, tuple[int, ...]], list[StoredPart]] = {}  # that the model has

    def find_parts(self, name: str, shape: tuple[int, ...]) -> list[StoredPart]:
        """Finds the model's tensors in one of a checkpoint. Those of an earlier update are remembered."""
        found = self._found.get((name, shape))
        if found is None:
            found = list_stored_parts(self._find_part(name), shape, self.tensors)
            if all((known := self.tensors.get(part.name)) and known.shape == part.shape for part in found):
                self._found[name, shape] = found
        return found

    def find_name(self, name: str) -> str:
        """Finds the model's tensor that has a name in a checkpoint. Raises UpdateError."""
        (part,) = list_stored_parts(self._find_part(name), (), self.tensors)
        if part.name not in self.tensors:
            raise UpdateError(f"{name}: {self._explain(name)}")
        return part.name

    def check(self, infos: Sequence[TensorInfo], written: Collection[str]) -> None:
        """Raises UpdateError for tensors that the model does not have so, or that have come before."""
        names = set(written)
        parts = ((info, part) for info in infos for part in self.find_parts(info.name, info.shape))
        for info, part in parts:
            if part.name in names:
                raise UpdateError(f"{info.name} comes twice in one update")
            names.add(part.name)
            expected = self.tensors.get(part.name)
            if expected is None and is_of_other_part(info.name):
                continue
            if expected is None:
                raise UpdateError(f"{info.name}: {self._explain(info.name)}")
            if part.shape != expected.shape:
                raise UpdateError(f"{info.name} has shape {list(part.shape)}, the model's has {list(expected.shape)}")
            if SAFETENSORS[info.dtype] not in expected.dtypes:
                supported = [str(dtype)[6:] for dtype, name in SAFETENSORS.items() if name in expected.dtypes]
                raise UpdateError(f"{info.name} is of type {str(info.dtype)[6:]}; supported: {', '.join(supported)}")

    def check_complete(self, written: Collection[str]) -> None:
        """Raises UpdateError that names a tensor that has not come."""
        self.check_missing(name for name in self.tensors if name not in written)

    @staticmethod
    def check_missing(names: Iterable[str]) -> None:
        missing = sorted(names)
        if missing:
            more = f" (and {len(missing) - 1} more tensors)" if len(missing) > 1 else ""
            raise UpdateError(f"{missing[0]} is missing from the update{more}")

    def _explain(self, name: str) -> str:
        """Says why the model has no tensor of that name."""
        if name == HEAD:  # which it has unless it is tied
            return "the model's embeddings are tied; use them instead"
        for fused, parts in FUSED.items():
            if fused in name and not any(fused in each for each in self.tensors):
                return f"it is a fused matrix; use {parts}, as in a checkpoint"
        close = get_close_matches(name, self.tensors, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"the model has no such tensor{hint}"
