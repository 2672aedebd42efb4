"""Compiles grammars under limits of a processor's time and of memory; whatever exceeds them ends this process.

Reads a line of JSON with the tokens (see `limited.CheckedTokens`), then one with each grammar, a string. Writes one
with what is wrong with it, empty if nothing is, and before the first an empty one: the tokens are made. Ends with its
input.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterable

import msgspec

from toka_async.grammars.errors import GrammarError
from toka_async.grammars.limited import MOST_BYTES, MOST_SECONDS, CheckedTokens
from toka_async.grammars.vocabulary import GrammarVocabulary

STATUS = "/proc/self/statm"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
    lines = iter(sys.stdin.buffer.readline, b"")
    tokens = msgspec.json.decode(next(lines), type=CheckedTokens)
    vocabulary = GrammarVocabulary(lambda: tokens.tokenizer, tokens.num_tokens, tokens.end_ids)
    vocabulary.check("start: /a/\n")  # waits for the tokens
    limit_memory(MOST_BYTES)
    answer("")
    for error in check(vocabulary, lines):
        answer(error)


def check(vocabulary: GrammarVocabulary, lines: Iterable[bytes]) -> Iterable[str]:
    for line in lines:
        limit_time(MOST_SECONDS)
        try:
            vocabulary.check(msgspec.json.decode(line, type=str))
        except GrammarError as error:
            yield str(error)
        else:
            yield ""


def limit_memory(num_bytes: int) -> None:
    """Lets the process have so many bytes more than now."""
    with open(STATUS) as status:
        now = int(status.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))


def limit_time(seconds: int) -> None:
    """Lets the process have so many seconds of a processor from now on, and up to one more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, most))


def answer(error: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(error) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
