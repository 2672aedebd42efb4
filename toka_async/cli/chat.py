"""`toka-async chat`: a conversation with a running server in the terminal.

The end of the input or /exit ends it. Ctrl-C stops the answer that is coming, and a line that is being typed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from toka_async.cli.ping import Message, PingError, PingQuestion, Server

PROMPT = "> "
HELP = "/clear begins anew, /exit or Ctrl-D ends; Ctrl-C stops an answer"


def chat(server: Server, settings: PingQuestion, system: str = "") -> int:
    """Talk until the user ends it; the exit code: 1 when the first question already found no server.

    settings: what all questions have in common; their messages are the conversation.
    """
    begun: list[Message] = [{"role": "system", "content": system}] if system else []
    messages, has_spoken = [*begun], False
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its editing and history
        print(HELP)
    for line in _lines(is_terminal):
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/clear":
                messages = [*begun]
                print("the conversation begins anew")
                continue
            case "/help":
                print(HELP)
                continue
            case command if command.startswith("/") and " " not in command and "/" not in command[1:]:
                print(f"unknown command {command}; {HELP}")
                continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(server, replace(settings, messages=messages))
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
            messages.pop()  # nothing came: as if it had not been asked
    return 0


def _lines(is_terminal: bool) -> Iterator[str]:
    """What the user says, up to the end of the input."""
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


def _answer(server: Server, question: PingQuestion) -> str:
    """Prints the answer as it comes; what has come of it when Ctrl-C stops it."""
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
