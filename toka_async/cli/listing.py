"""Lists the configuration for people: keys with their meaning, a Markdown table, and TOML that can be served again."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from toka_async.config import Config
from toka_async.config.load import Field, list_sections
from toka_async.config.text import format_toml

HEAD = (
    "# The configuration in effect. Marked values were `auto` and are resolved for this machine,",
    "# now. What still is `auto` is resolved at the start. Meanings: toka-async config --help",
)
PLAIN_HEAD = ("# The configuration in effect. Meanings: toka-async config --help",)


def key_lines(fields: Iterable[Field], width: int) -> Iterator[str]:
    """A line with key and value, and below it meaning and type, at most `width` wide."""
    for field in fields:
        yield f"  {field.key}={field.default}"
        yield from textwrap.wrap(
            f"{field.meaning} [{field.type}]", width, initial_indent=" " * 6, subsequent_indent=" " * 6
        )


def markdown_lines(fields: Iterable[Field]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in fields:
        default = f"`{field.default}`" if field.default else ""
        yield f"| `{field.key}` | {field.type} | {default} | {field.meaning} |"


def toml_lines(config: Config, resolved: Config) -> Iterator[str]:
    """`resolved` as TOML; values that are `auto` in `config` only are marked."""
    yield from PLAIN_HEAD if config == resolved else HEAD
    before = {name: dict(fields) for name, fields in list_sections(config)}
    for name, fields in list_sections(resolved):
        yield ""
        yield f"[{name}]"
        for key, value in fields:
            line = f"{key} = {format_toml(value)}"
            yield f"{line:<34}  # auto" if before[name][key] != value else line
