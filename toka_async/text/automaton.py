"""Searches a text that arrives piece by piece for many strings in one pass (Aho and Corasick, 1975).

A state is the longest end of the text so far that begins a string. The work is a few steps per character on average,
for any number of strings and however nearly they match. Knows strings only.
"""

from __future__ import annotations

from collections.abc import Sequence


class Automaton:
    """An automaton over some strings; states are numbers and 0 is the first.

    Attributes:
        firsts: characters that strings begin with; in state 0 a text without them changes nothing.
        children: by state, character -> state of one character more.
        shorter: by state, the state of the longest proper end that is a beginning as well.
        found: by state, the longest string that ends there, or None.
        held: by state, how many characters at the end begin a longer string.
    """

    __slots__ = ("children", "firsts", "found", "held", "shorter")

    def __init__(self, strings: Sequence[str]) -> None:
        self.firsts = frozenset(string[0] for string in strings)
        self.children: list[dict[str, int]] = [{}]
        self.found: list[str | None] = [None]
        depths = [0]
        for string in strings:
            state = 0
            for char in string:
                following = self.children[state].get(char)
                if following is None:
                    following = self.children[state][char] = len(self.children)
                    self.children.append({})
                    self.found.append(None)
                    depths.append(depths[state] + 1)
                state = following
            self.found[state] = string
        self.shorter = [0] * len(depths)
        self.held = depths
        self._link()

    def _link(self) -> None:
        """Fills in `shorter` by rising length, because a state needs its shorter state's entries."""
        level = list(self.children[0].values())
        while level:
            for state in level:
                shorter = self.shorter[state]
                self.found[state] = self.found[state] or self.found[shorter]
                if not self.children[state]:
                    self.held[state] = self.held[shorter]
                for char, child in self.children[state].items():
                    self.shorter[child] = self.next(shorter, char)
            level = [child for state in level for child in self.children[state].values()]

    def next(self, state: int, char: str) -> int:
        while (following := self.children[state].get(char)) is None and state:
            state = self.shorter[state]
        return following or 0

    def find(self, state: int, text: str, start: int = 0) -> tuple[int, int]:
        """Reads `text` from character `start` on, up to the end of the first string found.

        Returns the state there and the position.
        """
        children, shorter, found = self.children, self.shorter, self.found
        for place in range(start, len(text)):
            char = text[place]
            while (following := children[state].get(char)) is None and state:
                state = shorter[state]
            state = following or 0
            if found[state] is not None:
                return state, place + 1
        return state, len(text)
