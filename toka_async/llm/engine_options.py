"""Options of `LLM` as a configuration: our keys, and the names that vLLM has for them.

Nothing is accepted and ignored: an option becomes a key, asks for nothing, or is refused with what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from toka_async.cli.habits import OPTIONS
from toka_async.config import Config, ConfigError, load_config
from toka_async.config.load import is_flag, list_keys, list_sections
from toka_async.config.text import format_value

SECTIONS = frozenset(field.name for field in msgspec.structs.fields(Config))
FOREIGN = (  # beginnings of keys for servers that others use
    *("server.host", "server.port", "server.tls", "server.data_dir", "auth."),
    *("zmq.bind", "zmq.key", "zmq.clients", "zmq.insecure"),
)
# Options of vLLM without a counterpart, with the values that ask for nothing. False, None and empty values do so too.
ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "trust_remote_code": (True,),  # a permission that is never used
    "enable_chunked_prefill": (True,),
    "distributed_executor_backend": ("mp",),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "skip_tokenizer_init": (),
    "swap_space": (),
    "hf_overrides": (),
    "limit_mm_per_prompt": (),
    "disable_custom_all_reduce": (),
}
QUIET = {"log.stats_interval": "0", "server.page": "false", "zmq.buffer_mb": "65536"}  # unless the user says otherwise


class EngineArgs:
    """The model and the options of an engine that is started later, as for vLLM's `from_engine_args`."""

    def __init__(self, model: str, **options: Any) -> None:
        self.model = model
        self.options = options


def make_config(model: str, config: Path | str | None, options: Mapping[str, Any]) -> Config:
    """Make a configuration of a file, if any, and options.

    Args:
        options: `section={"key": value}`, `"section.key"`, or a name of vLLM's such as `tensor_parallel_size`.

    Raises:
        ConfigError: an option is unknown, not supported or ill-typed; the message names it and the fix.
    """
    file = None if config is None else Path(config)
    of_file = {override.partition("=")[0] for override in list_overrides(load_config(file))}
    quiet = {key: value for key, value in QUIET.items() if key not in of_file}
    given = {**quiet, "model.path": model, **dict(_translate_all(options))}
    made = load_config(file, [f"{key}={value}" for key, value in given.items()])
    for override in list_overrides(made):
        if override.startswith(FOREIGN):
            raise ConfigError(f"{override}: LLM's engine is for this process only; use `toka-async serve` for others")
    return made


def _translate_all(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Translate options to keys and values as text."""
    for name, value in options.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", format_value(each)) for key, each in value.items())
        elif "." in name:
            yield name, format_value(value)
        else:
            yield from _translate(name, value)


def _translate(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Translate an option with a name of vLLM's: to a key and its value, or to nothing."""
    habit = OPTIONS.get(f"--{name.replace('_', '-')}")
    if habit is None and name not in ASKS_NOTHING:
        known = [option.removeprefix("--").replace("-", "_") for option in OPTIONS]
        near = difflib.get_close_matches(name, [*known, *SECTIONS, *list_keys()], n=1)
        hint = f"did you mean {near[0]}?" if near else 'keys are given as cache={"num_tokens": 65536}'
        raise ConfigError(f"unknown option {name!r}; {hint}")
    if value is None:
        return
    if habit is None or not habit.key:
        if value and value not in ASKS_NOTHING.get(name, ()):
            raise ConfigError(
                f"{name}={value!r}: {habit.answer if habit is not None else 'not supported; leave it out'}"
            )
    elif not habit.value:
        text = str(value).removeprefix("torch.") if name == "dtype" else format_value(value)
        yield habit.key, habit.words.get(text, text)
    elif value is True:
        yield habit.key, habit.value
    elif value is not False:
        raise ConfigError(f"{name}: expected True or False, got {value!r}")
    elif is_flag(habit.key):
        yield habit.key, "false" if habit.value == "true" else "true"


def list_overrides(config: Config) -> list[str]:
    """List what differs from the defaults, as `section.key=value`."""
    defaults = {name: dict(values) for name, values in list_sections(Config())}
    return [
        f"{section}.{name}={format_value(value)}"
        for section, values in list_sections(config)
        for name, value in values
        if value != defaults[section][name]
    ]
