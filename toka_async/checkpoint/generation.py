"""Reads a model's sampling defaults and end tokens from `generation_config.json`.

`do_sample` is ignored: a server samples unless the temperature is 0. Knows no requests.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from toka_async.checkpoint.json_file import JsonFile
from toka_async.checkpoint.spec import ModelSpec


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for requests that do not set them. None: the model has no default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


def read_generation_defaults(model_dir: Path, spec: ModelSpec, use_file: bool) -> GenerationDefaults:
    """Returns the defaults of the model in `model_dir`.

    End tokens are `generation_config.json`'s, else `config.json`'s; sampling fields are read only with `use_file`.
    Raises ModelError when the file is corrupt or a value is out of range.
    """
    path = model_dir / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(eos_token_ids=spec.eos_token_ids)
    file = JsonFile(path)
    eos = file.token_ids("eos_token_id") or spec.eos_token_ids
    if not use_file:
        return GenerationDefaults(eos_token_ids=eos)
    return GenerationDefaults(
        temperature=_number(file, "temperature", 0.0, 100.0),
        top_p=_number(file, "top_p", 1e-9, 1.0),
        top_k=max(0, file.integer("top_k", least=-1)) if file.has("top_k") else None,
        min_p=_number(file, "min_p", 0.0, 1.0),
        repetition_penalty=_number(file, "repetition_penalty", 0.01, 100.0),
        eos_token_ids=eos,
    )


def _number(file: JsonFile, name: str, least: float, most: float) -> float | None:
    if not file.has(name):
        return None
    value = file.number(name, least=least)
    if value > most:
        raise file.error(name, f"is {value:g}: expected at most {most:g}; or set model.generation_config=none")
    return value
