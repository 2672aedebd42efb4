"""Small programs that play a supervisor's children: they speak as children do, and do nothing else."""

from __future__ import annotations

import sys

# How each begins: it hears what it is to be, and outlives its parent's signals.
SAY = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
def say(line): os.write(1, line.encode() + b"\\n")
def started(): say('{"type":"Started"}')
read = sys.stdin.buffer.raw.readline
assert read() == b"spec\\n"
"""


def command(program: str, **names: object) -> list[str]:
    """That runs the program with these names set."""
    values = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    return [sys.executable, "-I", "-S", "-c", values + program]
