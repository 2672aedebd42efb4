"""Reads a JSON file of a model directory field by field, with one clear line for each mistake.

Knows JSON and Python types, not what a field means.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1  # no number of a configuration is larger


class ModelError(ValueError):
    """The model's files are wrong or not supported; the message is one line that names the file and the fix."""


class JsonFile:
    """A JSON object with typed reads. A null field reads as absent.

    Raises ModelError when the file is missing, is not JSON, or a field has another type.
    """

    def __init__(self, path: Path, fields: dict[str, Any] | None = None, prefix: str = "") -> None:
        self.path = path
        self.fields = _read_object(path) if fields is None else fields
        self.prefix = prefix

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self.prefix}{name} {problem}")

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"is {value!r}: expected an integer of at least {least}")
        if value > most:
            raise self.error(name, f"is {value}: expected an integer of at most {most}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= sys.float_info.max:
            raise self.error(name, f"is {value!r}: expected a number of at least {least:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}: expected true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"is {value!r}: expected a string")
        return value

    def section(self, name: str) -> JsonFile:
        """Returns the object under `name`, empty when absent; its errors name the file and the inner field."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"is {value!r}: expected an object")
        return JsonFile(self.path, value or {}, f"{self.prefix}{name}.")

    def token_ids(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Reads one id or a list of ids; null means none, absent means `default`."""
        value = self.fields.get(name, list(default))
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v <= LARGEST for v in values):
            raise self.error(name, f"is {value!r}: expected a token id or a list of token ids")
        return tuple(values)

    def _required(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        if value is None and default is None:
            raise self.error(name, "is missing: a model's configuration must have it")
        return default if value is None else value


def _read_object(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # reading a pipe would wait for its other end
        raise ModelError(f"{path}: is not a file; download it again")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; model.path must be a directory in Hugging Face's layout") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, expected a JSON object; download it again")
    return value
