"""Lists the decoder-only models of the installed library, and which of them have an attention interface.

Whether a model can run is known for sure only from a trial of one with its configuration, see `describe`.
"""

from __future__ import annotations

import inspect
import sys

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toka_async.checkpoint.implementation import Architecture

INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def list_architectures() -> tuple[Architecture, ...]:
    found = []
    for model_type, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        name = names if isinstance(names, str) else names[0]
        found.append(Architecture(model_type, name, _find_problem(name)))
    return tuple(found)


def _find_problem(name: str) -> str:
    """Returns why no model of a class can run; empty: some may."""
    try:
        model = getattr(transformers, name)
        if model._is_stateful:
            return "its layers keep a state from token to token"
        if name.endswith("ForConditionalGeneration"):
            return "it has parts beside text"
        source = inspect.getsource(sys.modules[model.__module__])
    except (AttributeError, ImportError, OSError, KeyError) as error:
        return f"transformers cannot load it ({type(error).__name__})"
    return "" if INTERFACE in source else "its code has no attention interface"
