"""An update of one rank's weights: whole tensors come in chunks, and the rank's parts are written in place.

What a start makes of a checkpoint is made here too: matrices are fused, divided and quantized as they are written, so
nothing is allocated twice, and captured graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from toka_async.checkpoint.json_file import ModelError
from toka_async.model.decoder import RankModel
from toka_async.model.matrices.part import WeightPart
from toka_async.model.weights import check_tensors, load_tensors
from toka_async.transfer.tensors import TensorInfo
from toka_async.weights.catalog import UpdateError, WeightCatalog


class WeightUpdate:
    """One update. written: names of the tensors that have come, whether the rank has a part of them or not."""

    def __init__(self, decoder: RankModel, parts: Mapping[str, WeightPart], catalog: WeightCatalog) -> None:
        self.written: set[str] = set()
        self._decoder = decoder
        self._parts = parts
        self._catalog = catalog

    def check(self, infos: Sequence[TensorInfo]) -> None:
        """Raises UpdateError for announced tensors that cannot be loaded; nothing is written."""
        self._catalog.check(infos, self.written)

    @torch.inference_mode()
    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes tensors that were checked."""
        for name, tensor in tensors:
            for stored in self._catalog.find_parts(name, tuple(tensor.shape)):
                self.written.add(stored.name)
                part = self._parts.get(stored.name)
                if part is not None and part.target.numel():
                    part.write(part.cut(stored.view(tensor)))

    @torch.inference_mode()
    def read_directory(self, path: str) -> None:
        """Loads the safetensors files of a folder as a start does. Raises UpdateError."""
        folder = Path(path)
        if not folder.is_dir():
            raise UpdateError(f"{path}: there is no such folder")
        again = self.written & set(self._parts)
        if again:
            raise UpdateError(f"{min(again)} comes twice in one update")
        try:
            self._catalog.check_missing(set(self._parts) - check_tensors(self._decoder, folder))
            for name in load_tensors(self._decoder, folder):
                self.written.add(name)
        except ModelError as error:
            raise UpdateError(str(error)) from None
        self.written.update(self._catalog.tensors)  # other ranks have the others

    def finish(self, partial: bool) -> None:
        """Raises UpdateError where tensors have not come."""
        if not self.written:
            raise UpdateError("the update has no tensors")
        if not partial:
            self._catalog.check_complete(self.written)
