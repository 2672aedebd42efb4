"""Names of a foreign model's parameters in checkpoints, and where each tensor goes.

The library renames some tensors as it loads them, and stacks those of experts; here they have the names of a
checkpoint, one part for each tensor, as the library would write it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key

from toka_async.checkpoint.division import StagePart
from toka_async.model.matrices.part import WeightPart
from toka_async.model.matrices.share import Share
from toka_async.transformers.loading import refuse

_STACK, _JOIN = MergeModulelist, Concatenate


class CheckpointNames:
    """The names of one model's tensors. Raises ModelError for a model whose tensors are changed otherwise."""

    def __init__(self, model: Any) -> None:
        """model: with its head and all its layers, before anything in it is replaced."""
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._renamings: list[Any] = [each for each in conversions if not isinstance(each, WeightConverter)]
        self._reversed: list[Any] = [each.reverse_transform() for each in reversed(self._renamings)]
        self._prefix: str = model.base_model_prefix
        self._stacks: dict[str, tuple[str, ...]] = {}
        for converter in converters:
            kinds = [type(operation) for operation in converter.operations]
            dims = [operation.dim for operation in converter.operations if isinstance(operation, (_STACK, _JOIN))]
            if (kinds, dims) not in (([_STACK], [0]), ([_STACK, _JOIN], [0, 1])) or len(converter.target_patterns) > 1:
                continue  # refused below, where the model has such tensors
            self._stacks[converter.target_patterns[0]] = tuple(converter.source_patterns)
        others = [each for each in converters if each.target_patterns[0] not in self._stacks]
        names = [name for name, _ in model.named_parameters()]
        changed = [name for name in names if any(target in name for each in others for target in each.target_patterns)]
        if changed:
            raise refuse(model.config, f"transformers makes {changed[0]} of other tensors as it loads them")
        self._ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]

    def name_parts(self, name: str, values: Tensor, shares: tuple[Share, ...]) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors of a checkpoint that a parameter or buffer holds. shares: the rank's part of it."""
        target = next((target for target in self._stacks if name.endswith(target)), None)
        if target is None:
            if not shares:  # a number, which is loaded as a tensor of one
                values, shares = values.view(1), (Share(1, 0, 1),)
            is_factor = values.dim() == 1 and name.endswith("weight")
            yield self.rename(name), WeightPart(values, shares, constant=1.0 if is_factor else None)
            return
        sources = self._stacks[target]
        for expert in range(values.shape[0]):
            for source, rows, share in _cut(values[expert], shares[1], sources):
                each = self.rename(name.removesuffix(target) + source.replace("*", str(expert)))
                yield each, WeightPart(rows, (share, shares[2]))

    def normalize(self, name: str) -> str:
        """Names a tensor of a checkpoint, which may have an older name, as all checkpoints' are compared."""
        renamed: str = rename_source_key(name, self._renamings, [])[0]
        return renamed.removeprefix(f"{self._prefix}.")

    def needs_place(self, name: str, part: StagePart) -> bool:
        """Tells whether a tensor of a checkpoint that has no place should have one: it is of a layer of the part."""
        layer = re.search(r"\.(?:layers|h|blocks|block)\.(\d+)\.", f".{name}")
        ignored = name.endswith((".inv_freq", ".masked_bias")) or any(each.search(name) for each in self._ignored)
        return layer is not None and part.first <= int(layer[1]) < part.last and not ignored

    def rename(self, name: str) -> str:
        """Returns a checkpoint's name of a parameter."""
        renamed: str = rename_source_key(name, self._reversed, [], reverse=True)[0]
        return renamed


def _cut(values: Tensor, share: Share, sources: tuple[str, ...]) -> Iterator[tuple[str, Tensor, Share]]:
    """Cuts an expert's matrix into those of the checkpoint. share: the rank's rows, of all sources together."""
    count = len(sources)
    size = len(values) // count
    each = Share(share.total // count, share.start // count, share.size // count)
    for index, source in enumerate(sources):
        yield source, values[index * size : (index + 1) * size], each
