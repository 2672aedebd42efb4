"""Reads a model's configuration, and builds its modules, by the `transformers` library.

Only here is the library imported for its classes of models. Knows nothing of how steps run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from toka_async.checkpoint.json_file import ModelError
from toka_async.checkpoint.spec import MOST_LAYERS

# Kinds of rotary positions whose frequencies depend on a sequence's length, beyond the original context.
CHANGING_ROPES = ("dynamic", "longrope")
# What an attempt to use foreign code raises; it is code of many authors.
ANY_FAILURE = Exception


def read_config(model_dir: Path, trust_remote_code: bool) -> Any:
    """Returns the model's configuration. Raises ModelError."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
    except ANY_FAILURE as error:
        raise ModelError(f"{model_dir}: transformers {transformers.__version__} {_explain(error)}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise refuse(config, "its weights are quantized, and only families that run natively can have such")
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(config, "it is an encoder-decoder")
    if config.get_text_config() is not config:
        raise refuse(config, "it has parts beside text")
    num_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(num_layers, int) and num_layers > MOST_LAYERS:  # building them would take hours
        raise refuse(config, f"num_hidden_layers is {num_layers}: expected at most {MOST_LAYERS}")
    return config


def refuse(config: Any, reason: str) -> ModelError:
    """Makes the error that a model cannot run, which says why."""
    file = f"{config.name_or_path}/config.json: " if config.name_or_path else ""
    return ModelError(f"{file}model_type {config.model_type!r} cannot run through transformers: {reason}")


def build_modules(config: Any, dtype: torch.dtype, attention: str, trust_remote_code: bool) -> Any:
    """Builds the model with its head. Parameters are on the meta device, buffers on the CPU.

    attention: the name of a registered attention function. Raises ModelError.
    """
    config = config.__class__.from_dict(config.to_dict() | {"_name_or_path": config.name_or_path})
    try:
        with _parameters_on_meta():
            build: Callable[..., Any] = AutoModelForCausalLM.from_config
            model = build(config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code)
    except ANY_FAILURE as error:
        if isinstance(error, KeyError) and error.args == (attention,):
            raise refuse(config, "its code has no attention interface") from None
        raise refuse(config, _explain(error)) from None
    for module in model.modules():
        # Frequencies would follow the longest sequence of a step. Within the context that `describe` finds, none do.
        if getattr(module, "rope_type", None) in CHANGING_ROPES:
            module.rope_type = "default"
    return model.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Has modules take their parameters to the meta device as they get them; what they compute for buffers is real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # others may be tied
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _explain(error: Exception) -> str:
    """Describes what the library raised in one line."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    if first.endswith(":") and others:  # it says which field is wrong, and then how
        first = f"{first} {others[0].strip()}"
    hint = "; set model.trust_remote_code=true to run the model's own code" if "trust_remote_code" in str(error) else ""
    return f"cannot build it ({type(error).__name__}: {first}){hint}"
