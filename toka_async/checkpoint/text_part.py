"""Finds the text part of a checkpoint that has other parts too, such as one for images, which are left out.

Knows names only.
"""

from __future__ import annotations

from toka_async.checkpoint.json_file import JsonFile

_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.": ""}


def find_text_config(file: JsonFile) -> JsonFile:
    """Returns the fields of the language model: those of `text_config`, and what only the whole configuration says."""
    if not file.has("text_config"):
        return file
    text = file.section("text_config")
    whole = {name: value for name, value in file.fields.items() if not name.endswith("_config") or value is None}
    if file.has("quantization_config"):
        whole["quantization_config"] = file.fields["quantization_config"]
    inner = {name: value for name, value in text.fields.items() if value is not None}
    # Embeddings are tied as the whole model says.
    tied = {"tie_word_embeddings": whole["tie_word_embeddings"]} if "tie_word_embeddings" in whole else {}
    return JsonFile(file.path, whole | inner | tied)


def find_text_name(name: str) -> str:
    """Returns the name that a tensor or matrix of a whole checkpoint has in one of the language model alone."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
