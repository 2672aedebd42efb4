"""Builds a rank's model of the `transformers` library."""

from __future__ import annotations

from pathlib import Path

import torch

from toka_async.checkpoint.division import StagePart
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.comm import Comm
from toka_async.model.matrices.ops import Ops
from toka_async.model.weights import default_dtype
from toka_async.transformers.attention import ATTENTION
from toka_async.transformers.decoder import ForeignDecoder
from toka_async.transformers.loading import build_modules, read_config


def build_foreign(
    model_dir: Path,
    trust_remote_code: bool,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    comm: Comm,
    ops: Ops,
    part: StagePart | None = None,
) -> ForeignDecoder:
    """Builds a model with unset parameters on `device` (`meta` included). Raises ModelError.

    spec: the whole model. part: the layers of a stage; None: all.
    """
    config = read_config(model_dir, trust_remote_code)
    modules = build_modules(config, dtype, ATTENTION, trust_remote_code)
    with default_dtype(dtype), torch.device("meta"):  # the type of what is ours
        decoder = ForeignDecoder(modules, spec, comm, ops, part)
    decoder.materialize(device)
    return decoder
