from __future__ import annotations

from typing import Any

import pytest

from toka_async.grammars.vocabulary import GrammarVocabulary


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled from now on."""
    grammars: list[str] = []
    compile_it = GrammarVocabulary.compile

    def note(self: GrammarVocabulary, grammar: str) -> Any:
        grammars.append(grammar)
        return compile_it(self, grammar)

    monkeypatch.setattr(GrammarVocabulary, "compile", note)
    return grammars
