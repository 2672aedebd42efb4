from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import toka_async.llm

PACKAGE = Path(__file__).parents[2] / "toka_async"
MODULES = sorted(PACKAGE.rglob("*.py"))

CORE = {  # L0; "": the package
    *("", "config", "topology", "messages", "arrays", "control"),
    *("protocol", "logs", "log_writer", "bar"),
}
FAMILIES: dict[str, set[str]] = {  # what each part may import besides L0 and itself
    "checkpoint": set(),
    "grammars": set(),
    "openai": {"grammars"},
    "text": {"grammars"},
    "scheduler": set(),
    "transport": set(),
    "client": {"transport", "transfer"},
    "listening": set(),
    "socket_folder": set(),
    "gpu_lock": set(),
    "batches": set(),
    "nodes": {"transport"},
    "tables": set(),
    "kernels": set(),
    "memory": set(),
    "attention": {"checkpoint", "kernels", "memory"},
    "model": {"checkpoint", "attention", "kernels"},
    "server": {"openai", "grammars", "text", "transport", "batches", "checkpoint"},
    "runner": {"checkpoint", "grammars", "model", "attention", "kernels"},
    "tuning": {"checkpoint", "model", "attention", "kernels", "runner"},
    "transfer": set(),
    "transformers": {"checkpoint", "model", "attention"},
    "weights": {"checkpoint", "memory", "model", "transfer"},
    "startup": {
        "checkpoint",
        "grammars",
        "model",
        "attention",
        "kernels",
        "runner",
        "tuning",
        "weights",
        "transformers",
    },
}
FAMILIES["procs"] = set(FAMILIES) - {"client"}
FAMILIES[""] = {"llm"}  # for type checkers only: the package loads its names when they are used
TOP = {  # L4
    *("cli", "__main__", "launch", "supervisor", "restarts", "heartbeats", "capacity", "bench"),
    *("start_report", "replica_lives", "lifeline", "llm", "evaluation", "ray", "integrations"),
}
EXTERNAL = {  # all that these may import from elsewhere
    "": {"msgspec", "numpy"},
    "scheduler": {"msgspec", "numpy"},
    "batches": {"msgspec", "numpy"},
    "tables": {"msgspec", "numpy", "pyarrow"},
    "kernels": {"torch", "triton"},
}


def part_of(path: Path) -> str:
    """`scheduler` for toka_async/scheduler/core.py, `config` for toka_async/config/load.py, "" for the package."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@functools.cache
def imports(path: Path) -> list[str]:
    """Full names of everything that a module imports, anywhere in it; `a.b.c` for `from a.b import c`."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def allowed(part: str, name: str) -> bool:
    """May the part import `name`, such as `model.spec.ModelSpec` (the package's name taken off)?"""
    target = name.partition(".")[0]
    if target == part or target in CORE or not any((PACKAGE / f"{target}{end}").exists() for end in ("", ".py")):
        return True  # the last: a name in the package's __init__
    if part in TOP:
        return True
    return any(name == other or name.startswith(f"{other}.") for other in FAMILIES.get(part, ()))


def test_imports_point_down() -> None:
    wrong = []
    for path in MODULES:
        part = part_of(path)
        assert part in CORE | FAMILIES.keys() | TOP, f"{path} belongs to no layer"
        ours = [name.removeprefix("toka_async.") for name in imports(path) if name.startswith("toka_async")]
        wrong += [f"{path.relative_to(PACKAGE)} may not import {name}" for name in ours if not allowed(part, name)]
    assert wrong == []


def test_the_core_needs_little_from_elsewhere() -> None:
    wrong = []
    for path in MODULES:
        part = part_of(path)
        if (external := EXTERNAL.get("" if part in CORE else part)) is not None:
            names = {name.partition(".")[0] for name in imports(path)} - {"toka_async"} - set(sys.stdlib_module_names)
            wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in names - external]
    assert wrong == []


def folder_of(module: str) -> str:
    """`server.http` for `server.http.files`; a module beside the folders stands for itself."""
    return module.rpartition(".")[0] or module


def test_folders_form_no_circle() -> None:
    """Deletes folders that import no remaining one, until none is left."""
    names = {str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".") for path in MODULES}
    needs: dict[str, set[str]] = {}
    for path in MODULES:
        module = str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".")
        targets = {name.removeprefix("toka_async.") for name in imports(path)}
        found = {each if each in names else each.rpartition(".")[0] for each in targets} & names
        folder = folder_of(module)
        needs.setdefault(folder, set()).update({folder_of(each) for each in found} - {folder})
    while free := {folder for folder, needed in needs.items() if not needed & needs.keys()}:
        needs = {folder: needed for folder, needed in needs.items() if folder not in free}
    assert not needs, f"these folders import each other: {sorted(needs)}"


def test_a_folder_has_at_most_20_files() -> None:
    files = [*MODULES, *(PACKAGE.parent / "tests").rglob("*.py")]
    counts = Counter(path.parent for path in files if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > 20} == {}


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_rule_sees_a_wrong_import() -> None:
    assert not allowed("scheduler", "transport.codec.Codec")
    assert not allowed("server", "model.weights.load")
    assert not allowed("messages", "scheduler.core")
    assert not allowed("model", "startup.runner_factory")
    assert not allowed("server", "procs.child")
    assert not allowed("server", "client.client")
    assert not allowed("client", "server.zmq.session")
    assert allowed("server", "checkpoint.spec.ModelSpec")
    assert allowed("procs", "startup.runner_factory.RunnerFactory")
    assert allowed("scheduler", "__version__")


def test_the_package_has_all_that_its_python_interface_has() -> None:
    assert {*toka_async.__all__} == {*toka_async.llm.__all__, "__version__"}
    for name in toka_async.llm.__all__:
        assert getattr(toka_async, name) is getattr(toka_async.llm, name)
    with pytest.raises(AttributeError, match="'nothing'"):
        toka_async.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("toka_async", {"torch", "numpy", "msgspec", "zmq"}),
        ("toka_async.llm", {"torch", "aiohttp", "uvloop", "transformers"}),
        ("toka_async.scheduler.core", {"torch", "zmq", "aiohttp", "asyncio"}),
        ("toka_async.procs.scheduler", {"torch", "aiohttp"}),
        ("toka_async.procs.server", {"torch"}),
        ("toka_async.procs.rank", {"torch", "aiohttp"}),
        ("toka_async.cli", {"torch", "aiohttp", "zmq", "numpy"}),
        ("toka_async.server.app", {"torch"}),
        ("toka_async.launch", {"torch", "zmq", "aiohttp", "numpy"}),
        ("toka_async.client", {"torch", "aiohttp", "uvloop"}),
    ],
)
def test_importing_loads_nothing_heavy(module: str, heavy: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
