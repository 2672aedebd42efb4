"""The tokenizer of a model: text to token ids and back, from the files of a model directory.

Encodes with the `tokenizers` library, exactly as tokenizer.json says: its post-processor decides about special tokens
at the start and the end, as in transformers 5. Decodes with the table of `toka_async.text.pieces`. Never truncates or
pads. Knows no requests, chats or streams.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from toka_async.text.pieces import Pieces, TokenBytes, build_pieces, strip_start
from toka_async.text.tokenizer_files import (
    TokenizerError,
    TokenizerFiles,
    make_backend,
    read_content,
    read_tokenizer_files,
)

States = Mapping[str, dict[str, Any]]  # attributes of added tokens, by their texts


class Tokenizer:
    """Encodes and decodes; safe to share between threads.

    Attributes:
        vocab_size: the highest id plus one, added tokens included.
        longest: bytes of the longest token.
        special_ids: ids of the special tokens, which `decode` leaves out.
        special_tokens: names (`bos_token`) -> texts, for chat templates.
        bos_token_id, eos_token_id: None when the tokenizer names none.
        chat_template: Jinja source, or None.
        response_template: as the files have it, unchecked, or None.
        pieces: what each token adds to a text.
        backend: the library's tokenizer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        response_template: Any = None,
    ) -> None:
        """Owns the backend and switches off its truncation and padding.

        Raises TokenizerError when the backend's decoder is not supported.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.response_template = response_template
        self.pieces = _pieces(backend)
        self.special_ids = self.pieces.special
        self.vocab_size = max(self.pieces.rest, default=-1) + 1
        self.longest = max(map(len, self.pieces.rest.values()), default=1) or 1
        self.bos_token_id = self._find_id("bos_token")
        self.eos_token_id = self._find_id("eos_token")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads directory `path`: tokenizer.json and, where they exist, tokenizer_config.json and others.

        Raises TokenizerError, one line that names the file, when a file is missing or cannot be read.
        """
        backend, files = make_backend(path, read_content(path)), read_tokenizer_files(path)
        try:
            return cls(_add_tokens(backend, files), files.special_tokens, files.chat_template, files.response_template)
        except TokenizerError as error:
            raise TokenizerError(f"{path / 'tokenizer.json'}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`; texts of special tokens in it become those tokens.

        Raises TokenizerError for lone surrogates.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes each text, in parallel threads and without the interpreter's lock.

        Raises TokenizerError when a text has lone surrogates or the library cannot take it.
        """
        for text in texts:
            _check_text(text)
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's class is no Exception and cannot be imported
                raise
            raise TokenizerError(f"the tokenizer cannot take the text: {error}") from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, continues: bool = False) -> str:
        """Returns the text of `ids`. Invalid UTF-8 becomes U+FFFD; ids outside of the vocabulary have no text.

        continues: `ids` follow other tokens, so a space at their start is text. (Tokenizers of the SentencePiece kind
        put a space before a text's first word, and take it off.)
        """
        raw, _ = self.pieces.join(ids, skip_special_tokens, not continues)
        text = raw.decode("utf-8", "replace")
        return text if continues else strip_start(text, *self.pieces.strip)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text, special tokens included; they may be part of a character."""
        return self.pieces.rest[token_id]

    def token_text(self, token_id: int) -> str:
        """Returns a token as log-probs show it: with its leading space, and U+FFFD for parts of characters."""
        return self.pieces.rest[token_id].decode("utf-8", "replace")

    def spelling(self, token_id: int) -> str:
        """Returns the vocabulary's spelling of a token, e.g. `Ġthe`; empty for an unknown id."""
        return self.backend.id_to_token(token_id) or ""

    @property
    def special_texts(self) -> list[str]:
        """The texts of the special tokens."""
        return [self.spelling(token_id) for token_id in sorted(self.special_ids)]

    @property
    def marks(self) -> dict[str, int]:
        """Text -> id of added tokens that mark something in a text: special ones, and such as `<think>`."""
        added: dict[int, Any] = self.backend.get_added_tokens_decoder()
        return {each.content: token_id for token_id, each in added.items() if each.special or each.content[:1] in "<["}

    def with_shown(self, texts: Collection[str]) -> Tokenizer:
        """A tokenizer whose `decode` does not leave out these special tokens; it shares all else."""
        if not texts:
            return self
        made, pieces = copy(self), self.pieces
        ids = frozenset(token_id for token_id in self.special_ids if self.spelling(token_id) in texts)
        shown = TokenBytes(pieces.shown | {token_id: pieces.rest[token_id] for token_id in ids})
        made.pieces = replace(pieces, shown=shown, special=pieces.special - ids)
        made.special_ids = made.pieces.special
        return made

    def _find_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def read_for_grammars(path: Path) -> str:
    """Returns tokenizer.json of directory `path` with the tokens that the other files add. Raises TokenizerError.

    Mostly they add none, and the file stays as it is: the library takes half a second to read and write a large one,
    for which a rank that starts would wait.
    """
    content = read_content(path)
    with suppress(msgspec.DecodeError):
        present = msgspec.json.decode(content, type=_OwnTokens).by_content
        if not any(_find_missing(present, read_tokenizer_files(path))):
            return content.decode()
    return _add_tokens(make_backend(path, content), read_tokenizer_files(path)).to_str()


class _OwnTokens(msgspec.Struct):
    """The part of tokenizer.json that lists added tokens."""

    added_tokens: list[dict[str, Any]] = []

    @property
    def by_content(self) -> States:
        return {
            token["content"]: {name: value for name, value in token.items() if name != "id"}
            for token in self.added_tokens
        }


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


def _add_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> tokenizers.Tokenizer:
    """Adds the configuration's tokens where they differ from the backend's, as transformers does."""
    present = {token.content: token.__getstate__() for token in backend.get_added_tokens_decoder().values()}
    tokens, special = _find_missing(present, files)
    backend.add_tokens(tokens)
    backend.add_special_tokens(special)
    return backend


def _find_missing(present: States, files: TokenizerFiles) -> tuple[list[tokenizers.AddedToken], list[str]]:
    """Finds tokens, and texts of special ones, that the configuration has and a backend with these tokens has not."""
    listed = list(present.values()) if files.added_tokens is None else files.added_tokens
    named = set(files.special_tokens.values())
    tokens = [
        tokenizers.AddedToken(**(token | {"special": True} if token["content"] in named else token)) for token in listed
    ]
    known = present.keys() | {token.content for token in tokens}
    special = [text for text in files.special_texts if text not in known]
    return [token for token in tokens if token.__getstate__() != present.get(token.content)], special


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"text is not valid Unicode: a lone surrogate at character {error.start}") from error


def writes_spaces(tokenizer: Tokenizer) -> bool:
    """Tells whether texts have spaces before special tokens."""
    pieces = tokenizer.pieces
    return any(pieces.rest[token_id].startswith(b" ") for token_id in pieces.special)
