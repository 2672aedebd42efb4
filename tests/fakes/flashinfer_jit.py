"""FlashInfer's description of modules, and ninja, without a compiler: what is built is a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest


class FakeSpec:
    """A module of two sources. A library of which ninja knows nothing has the content `stale`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.build_dir = folder / name
        self.ninja_path = self.build_dir / "build.ninja"
        self.library = self.build_dir / f"{name}.so"
        self.sources = ["a.cu", "b.cu"]
        self.is_aot = False

    @property
    def is_compiled(self) -> bool:
        return self.library.exists()

    def write_ninja(self) -> None:
        self.build_dir.mkdir(exist_ok=True)
        self.ninja_path.write_text(self.name)

    def build(self, verbose: bool) -> None:
        assert not verbose
        self.write_ninja()
        for source in self.sources:
            (self.build_dir / f"{source}.o").touch()
        self.library.write_text("built")


class FakeJit:
    """Takes the place of `flashinfer.jit` and of the program ninja. specs: those made, by name."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.specs: dict[str, FakeSpec] = {}
        self.folder = folder / "modules"
        self.folder.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        ninja = programs / "ninja"
        # `ninja -n -C FOLDER -f FILE`
        ninja.write_text('#!/bin/sh\ngrep -q stale "$3"/*.so && echo "[1/3] nvcc" || echo "ninja: no work to do."\n')
        ninja.chmod(0o755)
        patch.setenv("PATH", str(programs), prepend=":")
        modules = {
            "flashinfer": {},
            "flashinfer.jit": {"current_compilation_context": SimpleNamespace(TARGET_CUDA_ARCHS={(9, "0a"), (8, "0")})},
            "flashinfer.jit.cascade": {"gen_cascade_module": lambda: self._make("cascade")},
            "flashinfer.jit.attention": {
                "gen_batch_prefill_module": lambda *x: self._make(f"prefill {x[0]} {x[1]} {x[5]} {x[8]}"),
                "gen_batch_decode_module": lambda *x: self._make(f"decode {x[4]} {x[7]}"),
            },
        }
        for name, members in modules.items():
            patch.setitem(sys.modules, name, SimpleNamespace(**members))  # type: ignore[arg-type]

    def build_all(self, names: Callable[[str], bool] = lambda _: True) -> None:
        for spec in self.specs.values():
            if names(spec.name):
                spec.build(False)

    def _make(self, name: str) -> FakeSpec:
        return self.specs.setdefault(name, FakeSpec(self.folder, name))
