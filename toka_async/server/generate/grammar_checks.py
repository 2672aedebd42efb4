"""Compiles grammars as ranks will, and remembers which ones are good.

A rank compiles a new grammar itself, and needs as long. So a request goes to the engine while its grammar is checked,
and is cancelled if that is no good. Nobody hears of it before. A grammar that may be costly is checked under limits,
before the engine has it: a rank could not stop compiling.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b

from toka_async.grammars.cost import is_costly
from toka_async.grammars.errors import GrammarError
from toka_async.grammars.lark import make_grammar, write_json
from toka_async.grammars.limited import EXCESSIVE, LimitedChecks
from toka_async.grammars.vocabulary import GrammarVocabulary, is_installed
from toka_async.openai.errors import bad_request
from toka_async.openai.generation import GenerationParams
from toka_async.text.formats.output_grammar import Schemas
from toka_async.text.tokenizer import Tokenizer

MOST_AT_ONCE = 4
MOST_KNOWN = 4096  # grammars whose check is remembered


class GrammarChecks:
    """Checks grammars against one model's tokens, in threads of their own: a grammar may take seconds."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._vocabulary: GrammarVocabulary | None = None
        self._limited: LimitedChecks | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._costly_executor: ThreadPoolExecutor | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by digest: what is wrong; empty: nothing is
        self._under_way: dict[bytes, asyncio.Future[str]] = {}

    def start(self, vocab_size: int) -> None:
        """Makes the tokens for grammars in a thread, so that no request waits for them."""
        if self._vocabulary is None and is_installed():
            tokens = self._tokenizer.backend.to_str, vocab_size, self._end_ids
            self._vocabulary, self._limited = GrammarVocabulary(*tokens), LimitedChecks(*tokens)
            self._executor = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="grammars")
            self._costly_executor = ThreadPoolExecutor(1, thread_name_prefix="costly-grammars")

    def close(self) -> None:
        """Checks no more costly grammars."""
        if self._limited is not None:
            self._limited.close()

    def knows(self, grammar: str) -> bool:
        """Tells whether a grammar needs no check: it was good, or there is none."""
        return not grammar or self._known.get(digest(grammar)) == ""

    def refuse_known(self, generation: GenerationParams) -> None:
        """Raises ApiError (400) as `check` does, if it is known already that the grammar cannot be used."""
        key = digest(generation.sampling.grammar)
        if key in self._known:
            self._known.move_to_end(key)
            raise_error(generation, self._known[key])

    async def check_costly(self, generation: GenerationParams, vocab_size: int) -> None:
        """Does as `check` for a grammar that may take much to compile."""
        if not self.knows(generation.sampling.grammar) and is_costly(generation.sampling.grammar):
            await self.check(generation, vocab_size)

    async def check(self, generation: GenerationParams, vocab_size: int) -> None:
        """Raises ApiError (400) for a request whose grammar cannot be used; names the field and why."""
        self.refuse_known(generation)
        grammar = generation.sampling.grammar
        if not self.knows(grammar):
            raise_error(generation, await asyncio.shield(self._find(generation, vocab_size)))

    def _find(self, generation: GenerationParams, vocab_size: int) -> asyncio.Future[str]:
        """Finds what is wrong with a grammar, once for all requests that wait for it."""
        grammar = generation.sampling.grammar
        key = digest(grammar)
        if key not in self._under_way:
            self.start(vocab_size)
            executor, loop = self._costly_executor if is_costly(grammar) else self._executor, asyncio.get_running_loop()
            found = loop.run_in_executor(executor, self._explain, grammar, generation.kept_tools)
            self._under_way[key] = found
            found.add_done_callback(partial(self._note, key))
        return self._under_way[key]

    def _note(self, key: bytes, found: asyncio.Future[str]) -> None:
        del self._under_way[key]
        if not found.cancelled() and found.exception() is None:
            self._known[key] = found.result()
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _explain(self, grammar: str, tools: Schemas) -> str:
        """What is wrong with a grammar, and with which function's arguments if it is one's; empty: nothing."""
        error = self._find_error(grammar)
        for name, (schema, strict) in tools.items() if error not in ("", EXCESSIVE) else ():
            own = make_grammar(write_json(schema or {"type": "object"}, strict=strict))
            if not is_costly(own) and (of_own := self._find_error(own)):
                return f"the function {name!r}: {of_own}"
        return error

    def _find_error(self, grammar: str) -> str:
        assert self._vocabulary is not None
        assert self._limited is not None
        if is_costly(grammar):
            return self._limited.find_error(grammar)
        try:
            self._vocabulary.check(grammar)
        except GrammarError as error:
            return str(error)
        return ""


def digest(grammar: str) -> bytes:
    return blake2b(grammar.encode(), digest_size=16).digest()


def raise_error(generation: GenerationParams, error: str) -> None:
    """Raises ApiError (400) that names the field, if there is an error."""
    if error:
        name = generation.grammar_param
        raise bad_request(f"'{name}' cannot be enforced: {error}", param=name, code="invalid_grammar")
