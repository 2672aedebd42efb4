"""Checks grammars that may take much to compile in a process of their own, which can be ended while it compiles.

A rank and the server compile in threads, and a thread can be stopped by nobody: one grammar of a few lines could take
all their memory, and all requests would wait for it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from signal import SIGKILL
from threading import Event, Lock

import msgspec

logger = logging.getLogger(__name__)

MOST_SECONDS = 1  # of a processor, and up to one more
MOST_BYTES = 1 << 30  # more than the process has with its tokens
EXCESSIVE = f"compiling it takes more than {MOST_SECONDS} s of a processor or {MOST_BYTES >> 30} GiB of memory"
# Like this process, it imports nothing from the working directory.
_COMMAND = (sys.executable, *["-P"] * sys.flags.safe_path, "-m", "toka_async.grammars.limited_process")


class CheckedTokens(msgspec.Struct, frozen=True):
    """What `GrammarVocabulary` is made of. tokenizer: the text of tokenizer.json."""

    tokenizer: str
    num_tokens: int
    end_ids: tuple[int, ...]


class LimitedChecks:
    """Checks one grammar at a time. The process starts with the first, and again after one that ended it."""

    def __init__(self, read_tokenizer: Callable[[], str], num_tokens: int, end_ids: Sequence[int]) -> None:
        self._read_tokenizer = read_tokenizer
        self._num_tokens = num_tokens
        self._end_ids = tuple(end_ids)
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = Lock()
        self._closed = Event()

    def find_error(self, grammar: str) -> str:
        """Returns what is wrong with a grammar; empty: nothing is. Waits for its turn and for the process.

        Raises OSError when the process does not start or is killed, and once this is closed.
        """
        with self._turn:
            process = self._process or self._start()
            error = _ask(process, grammar)
            if error is None:
                self._end()
                if process.returncode == -SIGKILL:  # not by a limit
                    raise OSError("the process that checks grammars was killed")
                logger.warning("a grammar is refused: %s", EXCESSIVE)
                return EXCESSIVE
            return error

    def close(self) -> None:
        """Ends the process, also while it compiles."""
        self._closed.set()
        if (process := self._process) is not None:
            process.kill()
        with self._turn:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed.is_set():
            raise OSError("grammars are checked no more")
        tokens = CheckedTokens(self._read_tokenizer(), self._num_tokens, self._end_ids)
        process = self._process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if self._closed.is_set():
            process.kill()
        if _ask(process, tokens) is None:
            self._end()
            raise OSError("the process that checks grammars does not start")
        return process

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()  # which ends it, unless it has ended or was killed
        process.stdout.close()
        process.wait()


def _ask(process: subprocess.Popen[bytes], question: object) -> str | None:
    """Returns the answer; None: the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(question) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        return None
    return msgspec.json.decode(line, type=str) if line.endswith(b"\n") else None
