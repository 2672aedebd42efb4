"""What can be compiled ahead of a start on a machine without a GPU, as images are built on: FlashInfer's modules."""

from __future__ import annotations

import logging
import os

import torch

from toka_async.attention.flashinfer import FAILURES, explain_failure, explain_no_flashinfer
from toka_async.attention.modules import ARCHITECTURES, make_module_request
from toka_async.checkpoint.division import group_experts, make_rank_spec
from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.config import Config
from toka_async.startup.device import name_dtype, resolve_stored_dtype
from toka_async.startup.module_compiler import compile_now
from toka_async.startup.progress import StartupProgress

logger = logging.getLogger(__name__)


def compile_without_gpu(spec: ModelSpec, config: Config, stages: StartupProgress) -> None:
    """Compiles FlashInfer's modules for the GPUs that `ARCHITECTURES` names, and logs what is left to a start.

    Raises ModelError if they are named, a start may use FlashInfer, and its modules cannot be compiled.
    """
    architectures = os.environ.get(ARCHITECTURES, "")
    may_use = not config.model.batch_invariant and config.attention.backend in ("auto", "flashinfer")
    if not architectures or not may_use:
        logger.warning(
            "there is no GPU here, so nothing is compiled or measured, and the model's files are all that is there; "
            "run this where the GPU is%s",
            f", or set {ARCHITECTURES}, such as 9.0a, to compile FlashInfer's modules" if may_use else "",
        )
        return
    name = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    dtype: torch.dtype = getattr(torch, name)
    stored = name_dtype(resolve_stored_dtype(config.cache, dtype))
    # Its advice is for a start that must use FlashInfer.
    kind = spec.attention
    reason, *_ = explain_no_flashinfer(torch.device("cuda"), dtype, kind.head_dim, kind.soft_cap).partition(";")
    if not reason:
        rank_spec = make_rank_spec(group_experts(spec, config.parallel.ep), config.parallel.tp)
        request = make_module_request(rank_spec, name, stored, architectures)
        try:
            with stages.stage("FlashInfer", "compiling its modules"):
                compile_now(request, stages.show)
        except FAILURES as error:
            reason = explain_failure(error)
    if reason:
        raise ModelError(
            f"{ARCHITECTURES}={architectures}: FlashInfer's modules cannot be compiled: {reason}; unset the variable, "
            "or use attention.backend=triton"
        )
    logger.warning(
        "FlashInfer's modules are compiled for %s; there is no GPU here, so the first start still compiles our own "
        "kernels, and measures",
        architectures,
    )
