"""Describes a model of the `transformers` library as a `ModelSpec`, or says why it cannot run.

The shape comes from the library's configuration class, so that what `config.json` leaves unsaid has its defaults, and
from a trial on the meta device.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toka_async.checkpoint.foreign_spec import ForeignAttentionSpec, ForeignFeedSpec
from toka_async.checkpoint.json_file import ModelError
from toka_async.checkpoint.layer_spec import LayerSpec, NormNames, NormSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.checkpoint.spec import DTYPES, ModelSpec
from toka_async.transformers.layers import find_decoder, find_layers, find_path, list_values
from toka_async.transformers.loading import CHANGING_ROPES, build_modules, read_config, refuse
from toka_async.transformers.names import CheckpointNames
from toka_async.transformers.parallel import Division, TraceComm, divide
from toka_async.transformers.probe import PROBE, AttentionCall, AttentionProbe
from toka_async.transformers.stage import check_pipeline


def describe(model_dir: Path, trust_remote_code: bool, tp: int = 1, pp: int = 1) -> ModelSpec:
    """Returns the whole model's shape. tp, pp: into how many parts it must divide. Raises ModelError."""
    config = read_config(model_dir, trust_remote_code)
    probe = AttentionProbe()
    model = build_modules(config, torch.bfloat16, PROBE, trust_remote_code)
    calls = probe.run(model)
    CheckpointNames(model)
    check_pipeline(model, pp)
    modules = [find_path(model, call.module) for call in calls]
    layers = find_layers(model, modules)
    find_decoder(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    division, of_rank = Division(), calls
    if tp > 1:
        division = divide(model, TraceComm(tp), (find_path(model, embedding), find_path(model, head)))
        try:
            of_rank = probe.run(model)
        except ModelError:  # its code does not find the heads that it expects
            raise _refuse_division(config, calls[0], tp) from None
    parts = zip(modules, calls, of_rank, layers, strict=True)
    eos = config.eos_token_id
    return ModelSpec(
        family=config.model_type,
        vocab_size=head.weight.shape[0],
        hidden_size=config.hidden_size,
        norm=NormSpec(0.0),
        tie_embeddings=tied,
        layers=tuple(
            _describe_layer(config, name, call, own, calls[0].scale, layer, division, tp)
            for name, call, own, layer in parts
        ),
        max_context=_find_max_context(config),
        dtype=_name_dtype(config),
        bos_token_id=config.bos_token_id,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        impl="transformers",
    )


def _describe_layer(
    config: Any,
    name: str,
    call: AttentionCall,
    own: AttentionCall,
    scale: float,
    layer: nn.Module,
    division: Division,
    tp: int,
) -> LayerSpec:
    """own: the call of a rank of `tp`, whose heads may be a part of those of `call`. scale: of all layers."""
    divides = own.num_heads < call.num_heads or tp == 1
    if divides and (own.num_heads * tp, own.num_kv_heads * tp) != (call.num_heads, call.num_kv_heads):
        raise _refuse_division(config, call, tp)
    divided, whole, num_others = list[MatrixSpec](), list[MatrixSpec](), 0
    for path, module in layer.named_modules():
        for each, values in list_values(module):
            shares = division.find(module, each, values)
            shape = [share.total for share in shares]
            if len(shape) < 2:
                num_others += math.prod(shape)
                continue
            matrix = MatrixSpec(
                names=(f"{path}.{each}",),
                outputs=(Units(math.prod(shape[:-1])),),
                inputs=Units(shape[-1]),
                split="outputs" if shares[-1].is_whole else "inputs",
            )
            is_divided = tp == 1 or not all(share.is_whole for share in shares)
            (divided if is_divided else whole).append(matrix)
    feed = ForeignFeedSpec(
        divided=tuple(divided), whole=tuple(whole), num_values=_count_values(config, [*divided, *whole])
    )
    mixer = ForeignAttentionSpec(
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        rope=None,
        window=call.window,
        scale=scale,
        factor=call.scale / scale,
        soft_cap=call.soft_cap,
        sinks=call.sinks,
        module=name,
        value_dim=call.value_dim,
        divides=divides,
        num_others=num_others,
    )
    return LayerSpec(mixer, feed, NormNames(before_mixer="", before_feed=""))


def _refuse_division(config: Any, call: AttentionCall, tp: int) -> ModelError:
    heads = f"{call.num_heads} heads and {call.num_kv_heads} KV heads"
    return refuse(config, f"parallel.tp={tp}: the model's plan does not divide {heads} so; use 1")


def _count_values(config: Any, matrices: list[MatrixSpec]) -> int:
    """Counts a token's values in a layer as if all products lived at once; norms compute in float32."""
    hidden_size: int = config.hidden_size
    return 8 * hidden_size + sum(min(matrix.num_outputs, 8 * hidden_size) for matrix in matrices)


def _find_max_context(config: Any) -> int:
    """Returns the positions of which the model's code computes the same in any company. Raises ModelError."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise refuse(config, "its configuration has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for fields in kinds:
        if fields.get("rope_type") in CHANGING_ROPES:
            positions = min(positions, int(fields.get("original_max_position_embeddings") or positions))
    return positions


def _name_dtype(config: Any) -> str:
    name = "float32" if config.dtype is None else str(config.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise refuse(config, f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name
