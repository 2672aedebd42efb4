"""The tokenizer of a model: text to token ids and back, from the files of a model directory.

Encodes with the `tokenizers` library, exactly as tokenizer.json says (its post-processor decides about special tokens
at the start and the end, as in transformers 5); decodes with the table of `toka_async.text.pieces`. Never truncates or
pads. Knows nothing of requests, chats or streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from toka_async.text.pieces import Pieces, build_pieces, strip_start
from toka_async.text.tokenizer_files import TokenizerError, TokenizerFiles, read_tokenizer_files


class Tokenizer:
    """Encodes and decodes; safe to share between threads.

    Attributes:
        vocab_size: the highest id plus one, added tokens included.
        longest: bytes of the longest token.
        special_ids: ids of the special tokens, which `decode` leaves out.
        special_tokens: names (`bos_token`) -> texts, for chat templates.
        bos_token_id, eos_token_id: None when the tokenizer names none.
        chat_template: Jinja source, or None.
        pieces: what each token adds to a text.
        backend: the library's tokenizer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Takes the backend over, and switches its truncation and padding off.

        Raises:
            TokenizerError: the backend's decoder is not supported.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.pieces = _pieces(backend)
        self.special_ids = self.pieces.special
        self.vocab_size = max(self.pieces.rest, default=-1) + 1
        self.longest = max(map(len, self.pieces.rest.values()), default=1) or 1
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer in directory `path`: tokenizer.json, and tokenizer_config.json and others where they exist.

        Raises:
            TokenizerError: a file is missing or cannot be read; one line that names it.
        """
        files = read_tokenizer_files(path)
        try:
            return cls(_with_added_tokens(files), files.special_tokens, files.chat_template)
        except TokenizerError as error:
            raise TokenizerError(f"{path / 'tokenizer.json'}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; texts of special tokens inside of it become those tokens.

        Raises:
            TokenizerError: `text` has lone surrogates.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode` for each text, in parallel threads and without the interpreter's lock.

        Raises:
            TokenizerError: a text has lone surrogates, or the library cannot take it.
        """
        for text in texts:
            _check_text(text)
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's class has no other name, and is no Exception
                raise
            raise TokenizerError(f"the tokenizer cannot take the text: {error}") from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, continues: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids outside of the vocabulary nothing.

        Args:
            continues: `ids` go on after other tokens, so that a space at their start is part of the text. (Tokenizers
                of the SentencePiece kind put a space before the first word of a text, and take it off.)
        """
        raw, _ = self.pieces.join(ids, skip_special_tokens, not continues)
        text = raw.decode("utf-8", "replace")
        return text if continues else strip_start(text, *self.pieces.strip)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to a text, special tokens included; may be a part of a character."""
        return self.pieces.rest[token_id]

    def token_text(self, token_id: int) -> str:
        """A token as log-probs show it: with its leading space; U+FFFD for parts of characters."""
        return self.pieces.rest[token_id].decode("utf-8", "replace")

    def spelling(self, token_id: int) -> str:
        """A token as the vocabulary spells it, e.g. `Ġthe`; empty for an id that has none."""
        return self.backend.id_to_token(token_id) or ""

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _pieces(backend: tokenizers.Tokenizer) -> Pieces:
    added: dict[int, Any] = backend.get_added_tokens_decoder()
    tokens = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    tokens |= {i: token.content for i, token in added.items()}
    special = frozenset(i for i, token in added.items() if token.special)
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    try:
        return build_pieces(tokens, special, decoder)
    except ValueError as error:
        raise TokenizerError(str(error)) from error


def _with_added_tokens(files: TokenizerFiles) -> tokenizers.Tokenizer:
    """The backend with the added tokens as the configuration has them, where that differs; as transformers does it."""
    backend = files.backend
    present = {token.content: token.__getstate__() for token in backend.get_added_tokens_decoder().values()}
    listed = list(present.values()) if files.added_tokens is None else files.added_tokens
    named = set(files.special_tokens.values())
    tokens = [
        tokenizers.AddedToken(**(token | {"special": True} if token["content"] in named else token)) for token in listed
    ]
    backend.add_tokens([token for token in tokens if token.__getstate__() != present.get(token.content)])
    known = present.keys() | {token.content for token in tokens}
    backend.add_special_tokens([text for text in files.special_texts if text not in known])
    return backend


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"text is not valid Unicode: a lone surrogate at character {error.start}") from error
