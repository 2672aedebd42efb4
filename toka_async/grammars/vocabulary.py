"""A model's tokens as grammars see them, and the check of a grammar against them.

Making it takes some 0.7 s and 100 MB for 128,000 tokens, so a thread does it ahead. Loads llguidance in that thread.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np

from toka_async.arrays import Int32
from toka_async.grammars.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

EXTRA = "structured output needs llguidance: pip install 'toka-async[structured]'"
LONGEST_ERROR = 500  # characters
WORD = 32  # ids of a word of a mask
# Tokens of blanks, of strings' texts by their length, and of what stands before the @ of an address. Those of a class
# that a grammar allows as a whole are allowed at once, others are tried one by one. Every mask asks for each class.
# Texts have no line ends of Unicode, which a pattern's dot leaves out.
TEXT_LENGTHS = (2, 4, 6, 10, 16, 30)
TOKEN_CLASSES = [
    r"[\x20\x0A\x0D\x09]+",
    *(r'[^"\\\x00-\x1F\x7F\u2028\u2029]' + count for count in (*(f"{{1,{most}}}" for most in TEXT_LENGTHS), "+")),
    "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,16}",
]
_EXCERPT = re.compile(r"\n\s*\d+ \| .*|<backtrace>.*", re.DOTALL)  # the grammar's lines around an error
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_UNTOLD = re.compile(r"Unable to determine if regex is empty: .*", re.DOTALL)
_UNSAID = {"<non-verbose/>": "", "NoExtensionBias": "it has no end, so no output matches it"}


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class GrammarVocabulary:
    """Tokens below `num_tokens`, of which `end_ids` end an output.

    Args:
        read_tokenizer: returns tokenizer.json with all added tokens; called in a thread that starts at once.
    """

    def __init__(self, read_tokenizer: Callable[[], str], num_tokens: int, end_ids: Sequence[int]) -> None:
        self.num_tokens = num_tokens
        self.num_words = -(-num_tokens // WORD)
        self.end_ids = frozenset(end_ids)
        self._read_tokenizer = read_tokenizer
        self._tokens: Future[LLTokenizer] = Future()
        Thread(target=self._make, name="grammars", daemon=True).start()

    def wait(self) -> None:
        """Waits until the tokens are made, or are known to be of no use."""
        wait([self._tokens])

    def compile(self, grammar: str) -> LLMatcher:
        """Compiles a grammar, without the interpreter's lock. Waits for the tokens. Raises GrammarError.

        Limits count work and not time: what one process compiles, all of them compile.
        """
        tokens = self._tokens.result()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(shorten_error(matcher.get_error()))
        return matcher

    def check(self, grammar: str) -> None:
        """Compiles a grammar and computes its first mask. Raises GrammarError."""
        self.compute_first_mask(self.compile(grammar))

    def compute_first_mask(self, original: LLMatcher) -> Int32:
        """Computes the mask of a copy, int32 [num_words]: the bits of ids that are allowed, lowest first.

        Raises GrammarError.
        """
        matcher = original.deep_copy()
        mask = np.empty(self.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(shorten_error(matcher.get_error()))
        return mask

    def _make(self) -> None:
        try:
            from llguidance import LLTokenizer

            tokens = LLTokenizer(
                self._read_tokenizer(),
                n_vocab=self.num_tokens,
                eos_token=sorted(self.end_ids),
                slices=TOKEN_CLASSES,
            )
        except ImportError:
            self._tokens.set_exception(GrammarError(EXTRA))
        except Exception as error:  # the library raises what it likes
            self._tokens.set_exception(GrammarError(f"grammars do not work with this tokenizer: {error}"))
        else:
            self._tokens.set_result(tokens)


def shorten_error(error: str) -> str:
    """Makes llguidance's words one line, without its excerpt of the grammar."""
    for name, meaning in _UNSAID.items():
        error = error.replace(name, meaning)
    error = _UNTOLD.sub("pattern: it takes too much work to tell whether a text matches all that allOf asks", error)
    text = " ".join(_PLACE.sub("", _EXCERPT.sub("", error)).split())
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}…"
