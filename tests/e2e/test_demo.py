"""`scripts/demo` and `scripts/install`, with a .venv that is there already: nothing is downloaded."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the scripts need of the repository, installed as far as `scripts/install` can tell."""
    for name in ("scripts/demo", "scripts/install", "configs/demo.toml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    wanted = hashlib.sha256((tmp_path / "pyproject.toml").read_bytes()).hexdigest()
    program(tmp_path / ".venv/bin/python", f'exec {sys.executable} "$@"')
    program(tmp_path / ".venv/bin/toka-async", f'exec {sys.executable} -m toka_async "$@"')
    (tmp_path / ".venv/.installed").write_text(f"{wanted}\n")
    return tmp_path


def program(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def old_python(path: Path) -> Path:
    """A program that says that it is Python 3.10."""
    program(path, "case $1 in -V) echo Python 3.10.13 ;; *) exit 1 ;; esac")
    return path


def run(checkout: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / script],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_demo_shows_samples_and_gets_it_right(checkout: Path) -> None:
    done = run(checkout, "demo")
    assert done.returncode == 0, done.stderr
    for part in ("serving demo at http://", "sample 3\n", "\nvote   30: ", " of 64 samples\n", " tokens/s\n"):
        assert part in done.stdout
    for part in ("device ", "dtype ", "context ", "cache ", "sequences ", "stopped"):
        assert f"toka-async: {part}" in done.stderr
    assert "somaxconn" not in done.stderr


def test_a_venv_of_an_old_python_is_named(checkout: Path) -> None:
    old_python(checkout / ".venv/bin/python")
    done = run(checkout, "install")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "scripts/install: .venv is of Python 3.10.13, and 3.11 or newer is needed: remove it (rm -r .venv) and start "
        "again\n"
    )


def test_a_venv_of_another_python_than_asked_for_is_named(checkout: Path) -> None:
    other = old_python(checkout / "bin/python3.10")
    done = run(checkout, "install", PYTHON=str(other))
    assert done.returncode == 2
    assert "and PYTHON is Python 3.10.13: remove .venv" in done.stderr


def test_without_a_python_that_is_new_enough_nothing_is_made(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    other = old_python(checkout / "bin/python3.10")
    done = run(checkout, "install", PYTHON=str(other))
    assert done.returncode == 2
    assert "Python 3.11 or newer is needed, and" in done.stderr
    assert "PYTHON=python3.12 scripts/install" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_old_python3_is_passed_over(checkout: Path) -> None:
    """The next on the path that is new enough makes .venv; the stand-in stops there."""
    shutil.rmtree(checkout / ".venv")
    old_python(checkout / "bin/python3")
    for name in ("python3.14", "python3.13", "python3.12", "python3.11"):
        program(checkout / "bin" / name, 'case "$2" in venv) echo made by $0 >&2; exit 3 ;; esac')
    done = run(checkout, "install", PATH=f"{checkout / 'bin'}:/usr/bin:/bin", PYTHON="")
    assert done.returncode == 3
    assert "made by" in done.stderr
    assert "python3.14" in done.stderr


@pytest.mark.parametrize("line", [None, "echo no such version >&2; exit 127"])
def test_a_python_that_is_not_there_is_said_in_one_line(checkout: Path, line: str | None) -> None:
    """Nor what a shell, or a version manager's stand-in for the program, has to say about it."""
    shutil.rmtree(checkout / ".venv")
    if line:
        program(checkout / "bin/python3.12", line)
    done = run(checkout, "install", PYTHON=str(checkout / "bin/python3.12"))
    assert done.returncode == 2
    assert done.stderr == (
        f"scripts/install: Python 3.11 or newer is needed, and {checkout}/bin/python3.12 is not there: name another, "
        "as in PYTHON=python3.12 scripts/install\n"
    )
