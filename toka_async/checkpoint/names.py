"""Names of tensors in checkpoints: those of a text part, as if it were the whole model, and of what one tensor holds.

The matrices of all experts may be one tensor [experts, rows, columns], with those of gate above those of up. The scale
of a whole matrix has two names, and is a number or a tensor of one.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

# What is before `.layers` in the names of a text model, alone or as a part of others.
TEXT_PREFIXES = ("model", "model.language_model", "language_model.model")
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|embed_vision|audio_tower|embed_audio)\."
)
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def find_text_name(name: str) -> str:
    """Returns the name that a tensor of a text part has in a model that is nothing else."""
    for prefix in TEXT_PREFIXES[1:]:
        if name.startswith(f"{prefix}."):
            return f"model.{name[len(prefix) + 1 :]}"
    return name.removeprefix("language_model.")


def is_of_other_part(name: str) -> bool:
    """Tells whether a tensor is of what sees or hears, which is not run."""
    return _OTHER_PARTS.match(name) is not None


@dataclass(slots=True, frozen=True)
class StoredPart:
    """A tensor of the model in a stored one. expert: its first index there, or -1: it is the stored one itself.

    first, size: rows of the expert.
    """

    name: str
    shape: tuple[int, ...]
    expert: int = -1
    first: int = 0
    size: int = 0

    def view(self, tensor: Any) -> Any:
        """Views it in the stored tensor."""
        return tensor if self.expert < 0 else tensor[self.expert, self.first : self.first + self.size]


def list_stored_parts(name: str, shape: Sequence[int], known: Container[str]) -> list[StoredPart]:
    """Lists the tensors of the model in a stored one; one under its own name if that is known, or is none of these."""
    if name not in known and name.removesuffix("_inv") in known:
        name = name.removesuffix("_inv")
    match = None if name in known else _STACKED.fullmatch(name)
    if match is None or len(shape) != 3:
        return [StoredPart(name, tuple(shape) or (1,))]
    matrices, (experts, rows, columns) = _MATRICES[match[2]], shape
    size = rows // len(matrices)
    return [
        StoredPart(f"{match[1]}.{expert}.{matrix}.weight", (size, columns), expert, place * size, size)
        for expert in range(experts)
        for place, matrix in enumerate(matrices)
    ]


@dataclass(slots=True, frozen=True)
class StoredSlice:
    """A `StoredPart` of a slice of a safetensors file, which is read as one."""

    part: StoredPart
    stored: Any

    def get_shape(self) -> tuple[int, ...]:
        return self.part.shape

    def get_dtype(self) -> str:
        dtype: str = self.stored.get_dtype()
        return dtype

    def __getitem__(self, indices: tuple[slice, ...]) -> Any:
        part = self.part
        if part.expert < 0:
            return self.stored[indices] if self.stored.get_shape() else self.stored[()].reshape(1)[indices]
        rows, columns = indices
        moved = slice(part.first + rows.start, part.first + rows.stop)
        return self.stored[part.expert : part.expert + 1, moved, columns][0]
