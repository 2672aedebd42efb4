"""Reads the scales of keys and values that a checkpoint has for a cache in E4M3.

A layer has one number for its keys and one for its values, under one of several names: compressed-tensors writes
`self_attn.k_scale`, or `self_attn.k_proj.output_scale` in older checkpoints, ModelOpt `self_attn.k_proj.k_scale`. The
names are those that vLLM reads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from toka_async.attention.kv_cache import LayerScales
from toka_async.checkpoint.division import StagePart
from toka_async.checkpoint.json_file import ModelError
from toka_async.checkpoint.names import find_text_name

logger = logging.getLogger(__name__)

# Group 2 is of what: keys (k), values (v), both (kv), or what has none here: queries (q), the softmax (prob).
_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:attn\.|[qkv]_proj\.|qkv_proj\.)?(kv?|v|q|prob)_scale"
    r"|model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.output_scale"
    r"|model\.layers\.(\d+)\.self_attn\.(prob)_output_scale"
)


def parse_scale_name(name: str) -> tuple[int, str] | None:
    """Returns the layer of a scale, and of what it is: k, v, kv, q, prob; None: it is another tensor."""
    match = _NAME.fullmatch(find_text_name(name))
    if match is None:
        return None
    layer, kind = (group for group in match.groups() if group is not None)
    return int(layer), kind


def read_cache_scales(paths: Iterable[Path], part: StagePart, announced: bool = False) -> tuple[LayerScales, ...]:
    """Reads the scales of a stage's layers from safetensors files: 1 for those that the files do not have.

    announced: the checkpoint says that it has them. Warns if it does, or has some of them, and others are missing.
    Raises ModelError, which names the tensor, for one that is no positive number.
    """
    scales, missing = [LayerScales()] * part.size, {(layer, kind) for layer in range(part.size) for kind in "kv"}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    layer, kind = parse_scale_name(name) or (-1, "")
                    if part.first <= layer < part.last and kind in ("k", "v", "kv"):
                        scale = _check_scale(path, name, file.get_tensor(name).flatten().float().tolist())
                        missing -= {(layer - part.first, each) for each in kind}
                        of_layer = scales[layer - part.first]
                        scales[layer - part.first] = LayerScales(
                            scale if "k" in kind else of_layer.keys, scale if "v" in kind else of_layer.values
                        )
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a readable safetensors file ({error}); download it again") from None
    if missing and (announced or len(missing) < 2 * part.size):
        layers = ", ".join(str(part.first + layer) for layer in sorted({layer for layer, _ in missing}))
        logger.warning(
            "cache.dtype=fp8: the checkpoint lacks a scale of keys or values in the layers %s: 1 is used", layers
        )
    return tuple(scales)


def _check_scale(path: Path, name: str, values: list[float]) -> float:
    if len(values) != 1:
        raise ModelError(f"{path}: tensor {name} has {len(values)} numbers; supported: one for a layer")
    if not 0 < values[0] < float("inf"):
        raise ModelError(f"{path}: tensor {name} is {values[0]:g}: expected a positive number")
    return values[0]
