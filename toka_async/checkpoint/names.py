"""Names of tensors in checkpoints: those of a text part, as if it were the whole model."""

from __future__ import annotations

import re

# What is before `.layers` in the names of a text model, alone or as a part of others.
TEXT_PREFIXES = ("model", "model.language_model", "language_model.model")
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|embed_vision|audio_tower|embed_audio)\."
)


def find_text_name(name: str) -> str:
    """Returns the name that a tensor of a text part has in a model that is nothing else."""
    for prefix in TEXT_PREFIXES[1:]:
        if name.startswith(f"{prefix}."):
            return f"model.{name[len(prefix) + 1 :]}"
    return name.removeprefix("language_model.")


def is_of_other_part(name: str) -> bool:
    """Tells whether a tensor is of what sees or hears, which is not run."""
    return _OTHER_PARTS.match(name) is not None
