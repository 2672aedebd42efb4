"""Decides whether our code or the `transformers` library computes a model, and reads its shape accordingly.

The library's classes are asked in a process of their own, so that those without torch stay so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from toka_async.checkpoint.families import FAMILIES, TEXT_PARTS
from toka_async.checkpoint.json_file import JsonFile, ModelError
from toka_async.checkpoint.spec import ModelSpec, read_spec
from toka_async.config import ModelConfig, ParallelConfig

NATIVE = frozenset({*FAMILIES, *TEXT_PARTS})  # of `model_type`
INSTALL = "pip install 'toka-async[transformers]'"
PACKAGE = Path(__file__).parents[1]
MODULE = "toka_async.transformers"
TIMEOUT = 600.0  # seconds; a disk may be slow


class LibraryQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What `toka_async.transformers` is asked: a model, or without a folder which models the library has."""

    model_dir: str = ""
    trust_remote_code: bool = False
    tp: int = 1
    pp: int = 1


class Architecture(msgspec.Struct, frozen=True):
    """A decoder-only model of the installed library. problem: why it cannot run; empty: it may."""

    model_type: str
    name: str
    problem: str = ""


class LibraryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    spec: ModelSpec | None = None
    error: str = ""
    architectures: tuple[Architecture, ...] = ()


def read_model(model_dir: Path, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
    """Reads the shape of the model as configured. Raises ModelError, which names the field and the fix."""
    if choose_implementation(model_dir, model) == "native":
        return read_spec(model_dir, model.quantize)
    for name, value, only in (
        ("model.quantize", model.quantize, "none"),
        ("model.batch_invariant", model.batch_invariant, False),
        ("parallel.ep", parallel.ep, 1),
    ):
        if value != only:
            raise ModelError(f"{name}={value}: models that run through transformers have {name}={only} only")
    question = LibraryQuestion(
        model_dir=str(model_dir.absolute()), trust_remote_code=model.trust_remote_code, tp=parallel.tp, pp=parallel.pp
    )
    answer = ask_library(question)
    if answer.spec is None:
        raise ModelError(answer.error)
    return answer.spec


def choose_implementation(model_dir: Path, model: ModelConfig) -> str:
    """Returns "native" or "transformers". Raises ModelError if the configuration cannot be read."""
    if model.impl != "auto":
        return model.impl
    name = JsonFile(model_dir / "config.json").text("model_type")
    if name in NATIVE:
        return "native"
    if find_spec("transformers") is None:
        raise ModelError(
            f"{model_dir / 'config.json'}: model_type {name!r} is not supported natively (supported: "
            f"{', '.join(sorted(NATIVE))}); others can run through transformers: {INSTALL}"
        )
    return "transformers"


def ask_library(question: LibraryQuestion) -> LibraryAnswer:
    """Asks in another process, which takes some seconds. Raises ModelError."""
    if find_spec("transformers") is None:
        raise ModelError(f"the library transformers is not installed: {INSTALL}")
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # no memory of a GPU is taken for a trial of shapes
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE],
            cwd=PACKAGE.parent,  # not a checkpoint's folder, whose files may be named like packages
            env=hidden,
            input=msgspec.json.encode(question),
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        return msgspec.json.decode(done.stdout, type=LibraryAnswer)
    except subprocess.TimeoutExpired:
        raise ModelError(f"transformers did not describe the model in {TIMEOUT:.0f} seconds") from None
    except msgspec.DecodeError:
        *_, last = [f"exit code {done.returncode}", *done.stderr.decode(errors="replace").strip().splitlines()]
        raise ModelError(f"transformers could not describe the model: {last}") from None
