"""Reads and checks the tokenizer files of a model directory. Does not encode or decode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or a text cannot be encoded."""


@dataclass(slots=True)
class TokenizerFiles:
    """What a directory's other tokenizer files say beside tokenizer.json.

    Attributes:
        special_tokens: names (`bos_token`) -> texts.
        special_texts: texts of all special tokens that the configuration names, in order.
        added_tokens: arguments of `tokenizers.AddedToken` for each token that the configuration adds, by id; None
            without a list.
        chat_template: Jinja source, or None.
        response_template: of tokenizer_config.json, unchecked, or None.
    """

    special_tokens: dict[str, str]
    special_texts: list[str]
    added_tokens: list[dict[str, Any]] | None
    chat_template: str | None
    response_template: Any = None


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Reads three files of directory `path` where they exist.

    They are tokenizer_config.json, special_tokens_map.json (if the configuration lists no added tokens, as in
    transformers) and chat_template.jinja (which precedes the configuration's template). Raises TokenizerError, one line
    that names the file, when a file is malformed.
    """
    config = _read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(path / "special_tokens_map.json")
    try:
        special_tokens = {name: _read_text(config[name]) for name in NAMED if config.get(name)}
        return TokenizerFiles(
            special_tokens=special_tokens,
            special_texts=list(dict.fromkeys([*special_tokens.values(), *_read_extra_texts(config)])),
            added_tokens=_read_added_tokens(config),
            chat_template=_chat_template(path, config),
            response_template=config.get("response_template"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{path / 'tokenizer_config.json'} is malformed: {error!r}") from error


def read_content(path: Path) -> bytes:
    """Reads tokenizer.json of directory `path`. Raises TokenizerError without one that can be read."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{file} does not exist; name a directory that has one: model.tokenizer=DIR")
    try:
        return file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {_one_line(error)}") from error


def make_backend(path: Path, content: bytes) -> tokenizers.Tokenizer:
    """Makes the library's tokenizer of directory `path`'s tokenizer.json. Raises TokenizerError if it is malformed."""
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{path / 'tokenizer.json'} is not a tokenizer: {_one_line(error)}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} cannot be read: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _read_text(token: str | Mapping[str, Any]) -> str:
    """Reads a special token, which is a string or an object with its content."""
    text = token if isinstance(token, str) else token["content"]
    if not isinstance(text, str):
        raise TypeError(f"special token {token!r} has no text")
    return text


def _read_extra_texts(config: Mapping[str, Any]) -> list[str]:
    for name in EXTRA:
        if extra := config.get(name):
            return [_read_text(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
    return []


def _read_added_tokens(config: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    listed = config.get("added_tokens_decoder")
    if listed is None:
        return None
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = [token for _, token in sorted(listed.items(), key=lambda item: int(item[0]))]
    return [{name: token[name] for name in names if name in token} for token in tokens]


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the template; the one named `default` if the configuration lists several."""
    if (file := path / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise TypeError(f"chat_template is {type(template).__name__}, not a string")
    return template
