"""Builds a rank's model: our decoder, or one whose layers the `transformers` library computes."""

from __future__ import annotations

from pathlib import Path

import torch

from toka_async.checkpoint.division import StagePart
from toka_async.checkpoint.spec import ModelSpec
from toka_async.config import ModelConfig
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.decoder import RankModel
from toka_async.model.matrices.ops import Ops, TorchOps
from toka_async.model.weights import build_decoder


def build_model(
    spec: ModelSpec,
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    comm: Comm | None = None,
    ops: Ops | None = None,
    layouts: LayoutPolicy | None = None,
    part: StagePart | None = None,
) -> RankModel:
    """Builds a model with unset parameters, see `build_decoder`. Raises ModelError if the library cannot."""
    if spec.impl == "native":
        return build_decoder(spec, dtype, device, comm, ops, layouts, part)
    from toka_async.transformers.build import build_foreign  # an extra

    trusts = config.trust_remote_code
    return build_foreign(model_dir, trusts, spec, dtype, device, comm or LocalComm(), ops or TorchOps(), part)
