"""Modules of one name, as Triton compiles launchers, in one thread and in several at the same time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime import build

from toka_async.kernels.launches.launchers import keep_launchers_apart

SOURCE = """#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&definition); }
"""
NUM_LAUNCHERS = 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))


def load(number: int) -> ModuleType:
    module: ModuleType = build.compile_module_from_src(SOURCE.replace("NUMBER", str(number)), "launcher")
    return module


def test_a_module_stays_as_it_was_loaded() -> None:
    original = build._load_module_from_path
    for number in range(NUM_LAUNCHERS):
        load(number)
    with keep_launchers_apart():
        modules = [load(number) for number in range(NUM_LAUNCHERS)]
    assert [module.launch() for module in modules] == [0, 1]
    assert build._load_module_from_path is original


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("eager_threads")
def test_threads_get_what_they_load() -> None:
    for number in range(NUM_LAUNCHERS):
        load(number)

    def load_some(first: int) -> set[int]:
        return {load(number % NUM_LAUNCHERS).launch() - number % NUM_LAUNCHERS for number in range(first, first + 200)}

    with keep_launchers_apart(), ThreadPoolExecutor(8) as pool:
        assert set.union(*pool.map(load_some, range(8))) == {0}
