"""Which numbers of tensor ranks a model's shape can be divided among, and what is then left for each of them.

Free of torch, so that a run can be refused before any process starts. Knows nothing of how ranks exchange anything.
"""

from __future__ import annotations

import msgspec

from toka_async.model.spec import ModelError, ModelSpec


def divides(spec: ModelSpec, tp: int) -> bool:
    """Whether `tp` ranks can each hold a part: as many query heads and inner units, and as many KV heads or a copy."""
    whole = spec.num_heads % tp == 0 and spec.intermediate_size % tp == 0
    return whole and (spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0)


def tensor_sizes(spec: ModelSpec) -> list[int]:
    """Every number of tensor ranks that the shape admits, ascending; vocabularies are padded, so any will do."""
    return [tp for tp in range(1, spec.num_heads + 1) if divides(spec, tp)]


def check_tensor_size(spec: ModelSpec, tp: int) -> None:
    """Raises ModelError, which lists the sizes that are possible, unless the shape can be divided among `tp` ranks."""
    if not divides(spec, tp):
        sizes = ", ".join(map(str, tensor_sizes(spec)))
        raise ModelError(
            f"parallel.tp={tp}: the model's {spec.num_heads} heads, {spec.num_kv_heads} KV heads and "
            f"intermediate_size of {spec.intermediate_size} cannot be divided so; use one of {sizes}"
        )


def spec_of_rank(spec: ModelSpec, tp: int) -> ModelSpec:
    """The shape of what one of `tp` ranks computes; it sees all logits, so the vocabulary stays whole."""
    assert divides(spec, tp), f"{tp} ranks"
    return msgspec.structs.replace(
        spec,
        num_heads=spec.num_heads // tp,
        num_kv_heads=max(1, spec.num_kv_heads // tp),
        intermediate_size=spec.intermediate_size // tp,
    )
