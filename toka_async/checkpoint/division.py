"""Divides a model's shape among ranks: layers over pipeline stages, and each layer over tensor ranks.

Free of torch, so that a run can be refused before any process starts. Knows no communication.
"""

from __future__ import annotations

import msgspec

from toka_async.checkpoint.spec import ModelError, ModelSpec


def can_divide(spec: ModelSpec, tp: int) -> bool:
    """Tells whether `tp` divides query heads and inner units, and KV heads can be divided or copied."""
    whole = spec.num_heads % tp == 0 and spec.intermediate_size % tp == 0
    return whole and (spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0)


def tensor_sizes(spec: ModelSpec) -> list[int]:
    """Returns every possible `tp`, ascending; any is possible for the vocabulary, which is padded."""
    return [tp for tp in range(1, spec.num_heads + 1) if can_divide(spec, tp)]


def check_tensor_size(spec: ModelSpec, tp: int) -> None:
    """Raises ModelError, which lists the possible sizes, unless `tp` ranks can divide the shape."""
    if not can_divide(spec, tp):
        sizes = ", ".join(map(str, tensor_sizes(spec)))
        raise ModelError(
            f"parallel.tp={tp}: the model's {spec.num_heads} heads, {spec.num_kv_heads} KV heads and "
            f"intermediate_size of {spec.intermediate_size} cannot be divided so; use one of {sizes}"
        )


def make_rank_spec(spec: ModelSpec, tp: int) -> ModelSpec:
    """Returns the shape that one of `tp` ranks computes; a rank sees all logits, so the vocabulary is undivided."""
    assert can_divide(spec, tp), f"{tp} ranks"
    return msgspec.structs.replace(
        spec,
        num_heads=spec.num_heads // tp,
        num_kv_heads=max(1, spec.num_kv_heads // tp),
        intermediate_size=spec.intermediate_size // tp,
    )


class StagePart(msgspec.Struct, frozen=True):
    """The layers `first` up to but not including `last` of a model of `num_layers`.

    The first part embeds tokens; the last one norms and has the head.
    """

    first: int
    last: int
    num_layers: int

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.num_layers


def all_layers(spec: ModelSpec) -> StagePart:
    """Returns the part that has all layers."""
    return StagePart(0, spec.num_layers, spec.num_layers)


def check_division(spec: ModelSpec, pp: int, tp: int) -> None:
    """Raises ModelError, which says what is possible, unless `pp` stages of `tp` tensor ranks are."""
    if pp > spec.num_layers:
        raise ModelError(f"parallel.pp={pp}: the model has {spec.num_layers} layers; use at most {spec.num_layers}")
    check_tensor_size(spec, tp)


def stage_parts(spec: ModelSpec, pp: int, tp: int) -> list[StagePart]:
    """Returns the parts of `pp` stages of `tp` tensor ranks, first stage first, with weights as even as possible."""
    table = -(-spec.vocab_size // tp) * spec.hidden_size
    parts, first = [], 0
    for size in stage_layers(spec.num_layers, pp, list_layer_weights(make_rank_spec(spec, tp)), table):
        parts.append(StagePart(first, first + size, spec.num_layers))
        first += size
    return parts


def stage_layers(num_layers: int, num_stages: int, layer: int, ends: int) -> list[int]:
    """Returns the number of layers of each stage, at least one, so that the heaviest is as light as possible.

    layer: the weight of a layer. ends: the weight of the first stage's embedding, and of the last stage's head.
    """
    assert 1 <= num_stages <= num_layers
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        extra = [ends * ((stage == 0) + (stage == num_stages - 1)) for stage in range(num_stages)]
        lightest = min(range(num_stages), key=lambda stage: counts[stage] * layer + extra[stage])
        counts[lightest] += 1
    return counts


def list_layer_weights(spec: ModelSpec) -> int:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    biases = spec.attention_bias * (queries + 2 * keys) + spec.output_bias * hidden
    biases += spec.mlp_bias * (2 * inter + hidden)
    return attention + 3 * hidden * inter + biases + 2 * hidden + spec.qk_norm * (queries + keys)


def num_weights(part: ModelSpec, stage: int, num_stages: int) -> int:
    """Counts the parameters of a rank. A tied head costs nothing where one stage also has the embedding."""
    first, last = stage == 0, stage == num_stages - 1
    table = part.vocab_size * part.hidden_size
    head = table if last and not (first and part.tie_embeddings) else 0
    return part.num_layers * list_layer_weights(part) + first * table + head + last * part.hidden_size


def make_stage_spec(spec: ModelSpec, part: StagePart) -> ModelSpec:
    """Returns the shape that a stage computes: its layers with their windows."""
    return msgspec.structs.replace(spec, num_layers=part.size, windows=spec.windows[part.first : part.last])
