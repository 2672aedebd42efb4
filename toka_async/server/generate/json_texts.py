"""The text of single tokens as JSON, looked up: made when a token is first seen.

Knows tokens; knows no sequences.
"""

from __future__ import annotations

import msgspec

from toka_async.text.tokenizer import Tokenizer


class JsonTexts(dict[int, bytes | None]):
    """Token id -> its text as JSON without quotes, or None for one that is not whole characters.

    Texts of tokens that follow each other are the concatenation, in JSON too.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._pieces = tokenizer.pieces.shown if skip_special_tokens else tokenizer.pieces.rest

    def __missing__(self, token_id: int) -> bytes | None:
        try:
            text = self._pieces[token_id].decode()
        except UnicodeDecodeError:
            value = None
        else:
            value = msgspec.json.encode(text)[1:-1]
        self[token_id] = value
        return value
