"""Divides a model's shape among ranks: layers over pipeline stages, and each layer over tensor ranks.

Free of torch, so that a run can be refused before any process starts. Knows no communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.cost import count_layer_bytes
from toka_async.checkpoint.experts_spec import ExpertsFeedSpec
from toka_async.checkpoint.layer_spec import FeedSpec, MixerSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.checkpoint.quantization import BLOCK, FORMATS
from toka_async.checkpoint.spec import ModelError, ModelSpec

_ITEMSIZE = 2  # bytes of a value that is not quantized, on the GPUs that pipelines are for
_PRECISION = 20  # bits in which a model's weights are compared


def can_divide(spec: ModelSpec, tp: int) -> bool:
    """Tells whether `tp` ranks can divide every layer's mixer and feed, into whole blocks of scales."""
    whole = all(half.can_divide(tp) for half in (*_list_mixers(spec), *_list_feeds(spec)))
    return whole and _find_broken_block(_divide(spec, tp)) is None


def _find_broken_block(spec: ModelSpec) -> MatrixSpec | None:
    """Finds a matrix that does not consist of whole blocks of scales."""
    kinds = {(layer.mixer, layer.feed, layer.format, layer.exempt): index for index, layer in enumerate(spec.layers)}
    matrices = (matrix for index in kinds.values() for matrix in spec.list_matrices(index))
    return next((matrix for matrix in matrices if not matrix.has_whole_blocks), None)


def _list_mixers(spec: ModelSpec) -> list[MixerSpec]:
    """Lists each of the layers' different mixers once."""
    return list(dict.fromkeys(layer.mixer for layer in spec.layers))


def _list_feeds(spec: ModelSpec) -> list[FeedSpec]:
    """Lists each of the layers' different feeds once."""
    return list(dict.fromkeys(layer.feed for layer in spec.layers))


def tensor_sizes(spec: ModelSpec) -> list[int]:
    """Returns every possible `tp`, ascending; any is possible for the vocabulary, which is padded."""
    return [tp for tp in range(1, spec.attention.num_heads + 1) if can_divide(spec, tp)]


def check_tensor_size(spec: ModelSpec, tp: int) -> None:
    """Raises ModelError, which lists the possible sizes, unless `tp` ranks can divide the shape."""
    if not can_divide(spec, tp):
        broken = _find_broken_block(spec)
        if broken is not None:
            is_published = bool(FORMATS[broken.format].scale_name)
            raise ModelError(
                f"{', '.join(broken.names)}: rows or columns are no multiple of {BLOCK}; supported: whole blocks of "
                f"{BLOCK} x {BLOCK} values; use {'the checkpoint in bfloat16 with ' if is_published else ''}scales by "
                "channel (model.quantize=fp8)"
            )
        blocks = " into whole blocks of scales" if any("block" in layer.format for layer in spec.layers) else ""
        sizes = ", ".join(_list_divisions(spec))
        mixers = " and ".join(dict.fromkeys(mixer.describe() for mixer in _list_mixers(spec)))
        feeds = " and ".join(feed.describe() for feed in _list_feeds(spec))
        raise ModelError(
            f"parallel.tp={tp}: the model's {mixers} and "
            f"{feeds} cannot be divided so{blocks}; " + (f"use one of {sizes}" if sizes else "no division is possible")
        )


def _list_divisions(spec: ModelSpec) -> list[str]:
    """Lists every possible `tp`; of a model with experts each with the possible `ep`."""
    if not any(isinstance(layer.feed, ExpertsFeedSpec) for layer in spec.layers):
        return list(map(str, tensor_sizes(spec)))
    most, possible = spec.attention.num_heads, dict[int, list[str]]()
    for ep in range(1, most + 1):
        grouped = group_experts(spec, ep)
        for tp in range(ep, most + 1, ep):
            if can_divide(grouped, tp):
                possible.setdefault(tp, []).append(str(ep))
    return [f"{tp} (parallel.ep={' or '.join(possible[tp])})" for tp in sorted(possible)]


def group_experts(spec: ModelSpec, ep: int) -> ModelSpec:
    """Returns the model with its experts divided over `ep` groups of tensor ranks. Raises ModelError if it has none."""
    feeds = [layer.feed for layer in spec.layers]
    if not any(isinstance(feed, ExpertsFeedSpec) for feed in feeds):
        if ep == 1:
            return spec
        raise ModelError(f"parallel.ep={ep}: the model has no experts; use 1")
    grouped = [
        msgspec.structs.replace(feed, num_groups=ep) if isinstance(feed, ExpertsFeedSpec) else feed for feed in feeds
    ]
    layers = zip(spec.layers, grouped, strict=True)
    return msgspec.structs.replace(
        spec, layers=tuple(msgspec.structs.replace(layer, feed=feed) for layer, feed in layers)
    )


def make_rank_spec(spec: ModelSpec, tp: int) -> ModelSpec:
    """Returns the shape that one of `tp` ranks computes; a rank sees all logits, so the vocabulary is undivided."""
    assert can_divide(spec, tp), f"{tp} ranks"
    return _divide(spec, tp)


def _divide(spec: ModelSpec, tp: int) -> ModelSpec:
    layers = [
        msgspec.structs.replace(layer, mixer=layer.mixer.divide(tp), feed=layer.feed.divide(tp))
        for layer in spec.layers
    ]
    return msgspec.structs.replace(spec, layers=tuple(layers))


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
    runs = join_layers(spec)
    if pp > len(runs):
        joined = max(runs, key=len)
        reason = f"the model has {spec.num_layers} layers"
        if len(joined) > 1:
            reason += f", and those from {joined[0]} to {joined[-1]} read each other's keys, so one stage has them"
        raise ModelError(f"parallel.pp={pp}: {reason}; use at most {len(runs)}")
    check_tensor_size(spec, tp)
    if not all(make_stage_spec(spec, part).attentions for part in stage_parts(spec, pp, tp)):
        raise ModelError(f"parallel.pp={pp}: a stage would have no layer with attention; use fewer stages")


def stage_parts(spec: ModelSpec, pp: int, tp: int) -> list[StagePart]:
    """Returns the parts of `pp` stages of `tp` tensor ranks, first stage first, with weights as even as possible."""
    rank_spec = make_rank_spec(spec, tp)
    runs = join_layers(spec)
    weights = [sum(count_layer_bytes(rank_spec, layer, _ITEMSIZE) for layer in run) for run in runs]
    table = -(-spec.vocab_size // tp) * spec.hidden_size * _ITEMSIZE
    parts, first = [], 0
    for count in stage_layers(weights, pp, table):
        own, runs = runs[:count], runs[count:]
        parts.append(StagePart(first, own[-1].stop, spec.num_layers))
        first = own[-1].stop
    return parts


def join_layers(spec: ModelSpec) -> list[range]:
    """Returns the runs of layers of which a stage has all or none, since some read the keys of others."""
    runs: list[range] = []
    for number, layer in enumerate(spec.layers):
        first = number - (layer.mixer.reads_back if isinstance(layer.mixer, AttentionSpec) else 0)
        while runs and runs[-1].stop > first:
            first = min(first, runs.pop().start)
        runs.append(range(first, number + 1))
    return runs


def stage_layers(layers: Sequence[int], num_stages: int, ends: int) -> list[int]:
    """Returns the number of layers of each stage, at least one; the sum of the stages' squared weights is least.

    layers: the weight of each layer. ends: the weight of the first stage's embedding, and of the last stage's head. Of
    equally good ways, later stages have fewer layers.
    """
    assert 1 <= num_stages <= len(layers)
    if num_stages == 1:
        return [len(layers)]
    import numpy as np  # for which a start's parent, who needs it for nothing else, would wait

    unit = max(1, (sum(layers) + ends) >> _PRECISION)  # sums of squares are then exact, so ties are ties
    before = np.concatenate([[0], np.cumsum([layer // unit for layer in layers])]).astype(float)
    weights = np.where(np.tri(len(before), dtype=bool), np.inf, before - before[:, None])  # of the layers [i, j)
    end = ends // unit
    least = (weights[0] + end) ** 2  # of the stages up to layer j
    cuts = []
    for stage in range(1, num_stages):
        sums = least[:, None] + (weights + end * (stage == num_stages - 1)) ** 2
        cuts.append(len(layers) - sums[::-1].argmin(axis=0))
        least = sums.min(axis=0)
    last, counts = len(layers), list[int]()
    for cut in reversed(cuts):
        first = int(cut[last])
        counts.append(last - first)
        last = first
    return [last, *reversed(counts)]


def make_stage_spec(spec: ModelSpec, part: StagePart) -> ModelSpec:
    """Returns the shape that a stage computes: some of the layers."""
    return msgspec.structs.replace(spec, layers=spec.layers[part.first : part.last])
