"""Makes a request of a row, as a line of OpenAI's batches.

What the value of the column is decides what is asked: text or token ids to continue, or the messages of a chat.
"""

from __future__ import annotations

from typing import Any

import msgspec

from toka_async.tables.source import TableError

COLUMNS = ("messages", "prompt")  # the usual names, in this order
TEXT_TOKENS = 256  # at most, of a continuation for which nothing else is asked
OURS = {"model", "messages", "prompt", "stream", "stream_options", "n", "seed", "suffix", "echo"}  # not for `extra`


class RowRequests(msgspec.Struct, frozen=True):
    """How a row becomes a request.

    column: of the prompts. chat: text is a user's message, not to be continued. system: the message before those of a
    chat. n: samples. seed: of the first row; each further row's is one more. sampling: further fields of the request.
    """

    column: str
    chat: bool = False
    system: str = ""
    n: int = 1
    seed: int | None = None
    sampling: dict[str, Any] = {}

    def make_line(self, number: int, prompt: Any) -> bytes:
        """The line [with its end] of the row with that number. Of a row without a prompt it is one that fails."""
        body = {**self.sampling, "n": self.n}
        if self.seed is not None:
            body["seed"] = self.seed + number
        messages = self._make_messages(prompt)
        if messages is None:
            body["prompt"] = None if find_fault(self.column, prompt) else prompt
            body.setdefault("max_tokens", TEXT_TOKENS)
        else:
            body["messages"] = messages
        url = "/v1/completions" if messages is None else "/v1/chat/completions"
        line = {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        return msgspec.json.encode(line, enc_hook=str) + b"\n"

    def _make_messages(self, prompt: Any) -> list[dict[str, Any]] | None:
        """The messages of a chat; None where text or tokens are to be continued."""
        if isinstance(prompt, str) and (self.chat or self.system):
            messages = [{"role": "user", "content": prompt}]
        elif _is_list_of(prompt, dict):
            messages = [_drop_nulls(message) for message in prompt]
        else:
            return None
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages


def choose_column(columns: list[str], wanted: str) -> str:
    """The column of the prompts. Raises TableError if there is none."""
    names = [wanted] if wanted else COLUMNS
    for name in names:
        if name in columns:
            return name
    listed = ", ".join(columns) or "none"
    raise TableError(f"no column {' or '.join(map(repr, names))}: choose one of {listed} with --column")


def check_sampling(sampling: dict[str, Any]) -> None:
    """Raises TableError for a field that has an option of its own, or that the rows fill."""
    if wrong := sorted(sampling.keys() & OURS):
        raise TableError(f"--extra-body cannot have {', '.join(wrong)}")


def find_fault(column: str, prompt: Any) -> str:
    """What is wrong with a row's prompt; empty if it can be asked."""
    if isinstance(prompt, str) or _is_list_of(prompt, dict) or _is_list_of(prompt, int):
        return ""
    found = "nothing" if prompt is None else "an empty list" if prompt == [] else type(prompt).__name__
    if isinstance(prompt, list) and prompt:
        found = f"a list with {type(prompt[0]).__name__}"
    return f"column {column!r}: expected text, token ids or messages, got {found}"


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is kind for each in value)


def _drop_nulls(value: Any) -> Any:
    """Leaves out the keys without a value: Arrow gives each message the keys of all."""
    if isinstance(value, dict):
        return {key: _drop_nulls(each) for key, each in value.items() if each is not None}
    return [_drop_nulls(each) for each in value] if isinstance(value, list) else value
