"""Lists the decoder-only models of the installed library, and which of them have an attention interface.

Whether a model can run is known for sure only from a trial of one with its configuration, see `describe`.
"""

from __future__ import annotations

import inspect
import sys

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toka_async.checkpoint.implementation import Architecture

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
COUNTING = "create_position_ids_from_input_ids"  # in the code of models that leave padding out of positions
PADDING = "its positions depend on which tokens are padding"


def list_architectures() -> tuple[Architecture, ...]:
    found = []
    for model_type, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        name = names if isinstance(names, str) else names[0]
        found.append(Architecture(model_type, name, find_problem(model_type, name)))
    return tuple(found)


def find_problem(model_type: str, name: str) -> str:
    """Returns why no model of a type can run; empty: some may. name: of the class that the library builds."""
    try:
        model, config = getattr(transformers, name), CONFIG_MAPPING[model_type]
        if model._is_stateful:
            return "its layers keep a state from token to token"
        if name.endswith("ForConditionalGeneration") or "text_config" in config.sub_configs:
            return "it has parts beside text"
        if config.is_encoder_decoder:
            return "it is an encoder-decoder"
        source = inspect.getsource(sys.modules[model.__module__])
    except (AttributeError, ImportError, OSError, KeyError) as error:
        return f"transformers cannot load it ({type(error).__name__})"
    if INTERFACE not in source:
        return "its code has no attention interface"
    if COUNTING in source:
        return PADDING
    if getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention"):
        return "its tokens see the tokens after them, unless its configuration sets is_decoder"
    return ""
