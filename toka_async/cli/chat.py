"""`toka-async chat`: a conversation with a running server in the terminal.

The end of the input or /exit ends it. Ctrl-C stops an answer, and a line that is being typed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from toka_async.cli.ping import Message, PingError, PingQuestion, Server

PROMPT = "> "
HELP = "/clear starts over, /exit or Ctrl-D quits; Ctrl-C stops an answer"


def chat(server: Server, settings: PingQuestion, system: str = "") -> int:
    """Talk until the user ends it; returns the exit code: 1 when the first question of a script fails.

    settings: what all questions share; the conversation becomes their messages.
    """
    begun: list[Message] = [{"role": "system", "content": system}] if system else []
    messages, has_spoken = [*begun], False
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its editing and history
        print(HELP)
    for line in _read_lines(is_terminal):
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/clear":
                messages = [*begun]
                print("the conversation starts over")
                continue
            case "/help":
                print(HELP)
                continue
            case command if command.startswith("/") and " " not in command and "/" not in command[1:]:
                print(f"unknown command {command}; {HELP}")
                continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _print_answer(server, replace(settings, messages=messages))
        except PingError as error:
            print(f"toka-async: {error}", file=sys.stderr)
            messages.pop()
            if not has_spoken and not is_terminal:
                return 1
            continue
        has_spoken = True
        if answer:
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()  # nothing came, so the question is dropped
    return 0


def _read_lines(is_terminal: bool) -> Iterator[str]:
    while True:
        try:
            line = input(PROMPT if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()
            continue
        yield line


def _print_answer(server: Server, question: PingQuestion) -> str:
    """Print the answer as it comes; returns it, or the part that came before Ctrl-C."""
    pieces: list[str] = []
    with contextlib.closing(server.stream(question)) as stream:
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        finally:
            print()
    return "".join(pieces)
