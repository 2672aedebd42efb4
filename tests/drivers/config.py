"""A configuration from the fields that a test names."""

from __future__ import annotations

from typing import Any

import msgspec

from toka_async.config import Config

SECTIONS = ("model", "server", "limits", "auth", "batches")  # no two of these have a field in common
PREFIXES = ("zmq", "log")


def make_config(**fields: Any) -> Config:
    """Each field goes to the section that has it; those of zmq and log come as `zmq_credit` and `log_requests`."""
    values: dict[str, dict[str, Any]] = {}
    names = {name: {field.name for field in msgspec.structs.fields(getattr(Config(), name))} for name in SECTIONS}
    for key, value in fields.items():
        prefix, _, rest = key.partition("_")
        section, name = (prefix, rest) if prefix in PREFIXES else (next(n for n in SECTIONS if key in names[n]), key)
        values.setdefault(section, {})[name] = value
    return msgspec.convert(values, Config)
