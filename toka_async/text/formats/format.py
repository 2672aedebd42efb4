"""What a family's models write for tool calls or reasoning, as data."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, Thought
from toka_async.text.formats.template import Json, ReadCalls

WriteCalls = Callable[[CallRules, GrammarTokens], str]
LETTERS = string.ascii_letters + string.digits


def new_call_id(length: int = 24, prefix: str = "call_") -> str:
    """An id that no other call has."""
    return prefix + "".join(secrets.choice(LETTERS) for _ in range(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of tool calls, of reasoning, or of both.

    name: as configurations have it, vLLM's where it has one. signs: a chat template is of this format when it has all
    the texts of one of them. fields: of a response template. read_calls: reads its regions of the kind `calls`.
    markers: further special tokens that the format reads. write_calls: the grammar of answers with calls. thought: how
    one is marked. wrap_content: the grammar of answers whose content is of a grammar, where content has a header.
    write_rest: the grammar of what may follow a thought, where that is more than any text.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    fields: Mapping[str, Json]
    read_calls: ReadCalls | None = None
    markers: tuple[str, ...] = ()
    write_calls: WriteCalls | None = None
    thought: Thought | None = None
    wrap_content: Callable[[str, GrammarTokens], str] | None = None
    write_rest: Callable[[GrammarTokens], str] | None = None
    new_id: Callable[[], str] = field(default=new_call_id)

    def is_in(self, chat_template: str) -> bool:
        return any(all(text in chat_template for text in sign) for sign in self.signs)
