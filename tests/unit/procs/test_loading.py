from __future__ import annotations

import gc

import pytest

from toka_async.procs.loading import hold_collections


def test_nothing_is_collected_while_modules_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with hold_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False]  # what was made is hidden before anything looks at it


def test_a_module_that_cannot_be_loaded_does_not_end_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(ModuleNotFoundError), hold_collections():
        raise ModuleNotFoundError
    assert gc.isenabled()
