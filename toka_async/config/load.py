"""Reads the configuration: a TOML file, then `section.key=value` overrides. Describes its keys for people."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toka_async.config.renamed import GONE, RENAMED
from toka_async.config.sections import ClusterConfig, Config, Section, SimulatedConfig
from toka_async.config.text import describe_type, format_value, list_choices, read_meaning, takes_numbers

SIMILAR = 0.5  # least similarity of a hint, of 1


class ConfigError(ValueError):
    """A user's configuration is wrong; the message is one line that names the key and the fix."""


class Field(msgspec.Struct, frozen=True):
    """One key of the configuration, for people: everything as text."""

    key: str
    type: str
    default: str
    meaning: str


_SECTIONS: dict[str, type[Section]] = {field.name: field.type for field in msgspec.structs.fields(Config)}
_FIELDS = {
    f"{name}.{field.name}": field for name, section in _SECTIONS.items() for field in msgspec.structs.fields(section)
}


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file, then `section.key=value` overrides; the rest has defaults.

    Raises ConfigError: unreadable file, unknown key, ill-typed value, or values that make no sense.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    if path is not None:
        for key, value in _read_file(path):
            section, name = _split_key(key)
            values[section][name] = _convert(key, value, strict=True)
    for text in overrides:
        key, equals, value = text.partition("=")
        check_renamed(key)
        if not equals and text in _FIELDS:
            raise ConfigError(f"{text!r}: expected {text}=VALUE")
        if not equals:
            raise ConfigError(f"{text!r}: expected section.key=value{_hint_nearest(text, _FIELDS)}")
        section, name = _split_key(key)
        values[section][name] = _convert(key, value, strict=False)
    config = msgspec.convert(values, Config)
    _check(config)
    return config


def describe(config: Config | None = None) -> list[Field]:
    """Describes every key, in order; `default` is the value in `config` if one is given."""
    config = config or Config()
    return [
        Field(
            key=key,
            type=describe_type(field.type),
            default=format_value(getattr(getattr(config, key.partition(".")[0]), field.name)),
            meaning=read_meaning(field.type),
        )
        for key, field in _FIELDS.items()
    ]


def list_keys() -> Collection[str]:
    return _FIELDS.keys()


def check_renamed(key: str) -> None:
    """Raises ConfigError for a key that has another name now, or is gone."""
    if key in RENAMED:
        raise ConfigError(f"{key} is now {RENAMED[key]}")
    if key in GONE:
        raise ConfigError(f"{key} is gone: {GONE[key]}")


def list_settings(config: Config) -> dict[str, str]:
    """List every key with its value as text, except those that say which machine this is."""
    return {field.key: field.default for field in describe(config) if not field.key.startswith("cluster.")}


def is_flag(key: str) -> bool:
    """Tells whether the key's value is true or false."""
    return key in _FIELDS and list_choices(_FIELDS[key].type) == ["true", "false"]


def is_number(key: str) -> bool:
    """Tells whether the key's value may be a number."""
    return key in _FIELDS and takes_numbers(_FIELDS[key].type)


def list_sections(config: Config) -> Iterator[tuple[str, Iterator[tuple[str, bool | int | float | str]]]]:
    """Lists every section with the names and values of its keys, in order."""
    for name in _SECTIONS:
        section = getattr(config, name)
        yield name, ((field.name, getattr(section, field.name)) for field in msgspec.structs.fields(section))


def _read_file(path: Path) -> Iterable[tuple[str, Any]]:
    """Reads (section.key, value) of each entry of a TOML file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for name, table in tables.items():
        for key in table if isinstance(table, dict) else ():
            check_renamed(f"{name}.{key}")
        if name not in _SECTIONS and not isinstance(table, dict):
            raise ConfigError(
                f"{name!r} in {path}: expected keys in a section, as in [server]{_hint_nearest(name, _FIELDS)}"
            )
        if name not in _SECTIONS:
            raise ConfigError(f"unknown section {name!r} in {path}{_hint_nearest(name, _SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} in {path}: expected a section, [{name}], got {table!r}")
        for key, value in table.items():
            yield f"{name}.{key}", value


def _split_key(key: str) -> tuple[str, str]:
    check_renamed(key)
    if key not in _FIELDS:
        raise ConfigError(f"unknown key {key!r}{_hint_nearest(key, _FIELDS)}")
    section, _, name = key.partition(".")
    return section, name


def _hint_nearest(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean …?` with the most similar of `known`; a bare field name matches its full key."""
    names = {name: name for name in known} | {name.partition(".")[2]: name for name in known if "." in name}
    close = difflib.get_close_matches(word.partition("=")[0], names, n=1, cutoff=SIMILAR)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _convert(key: str, value: object, *, strict: bool) -> object:
    """Converts `value` to the field's type; `strict=False` reads text, as overrides are."""
    kind = _FIELDS[key].type
    try:
        converted: object = msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError:
        words = list_choices(kind)
        hint = _hint_nearest(value, words) if isinstance(value, str) and words and value else ""
        raise ConfigError(f"{key}: expected {describe_type(kind, in_full=True)}, got {value!r}{hint}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{key}: expected {describe_type(kind)}, got {value!r}")
    if isinstance(converted, str) and "\x00" in converted:
        raise ConfigError(f"{key}: expected text without NUL characters")
    return converted


def _check(config: Config) -> None:
    """Refuses what is well-typed and makes no sense."""
    tokens, page = config.cache.num_tokens, config.cache.page_size
    if tokens != "auto" and tokens < page:
        raise ConfigError(f"cache.num_tokens: expected at least cache.page_size ({page}), got {tokens}")
    bodies, body = config.limits.max_bodies_mb, config.limits.max_body_mb
    if bodies != "auto" and bodies < body:
        raise ConfigError(f"limits.max_bodies_mb: expected at least limits.max_body_mb ({body}), got {bodies}")
    seqs, step = config.schedule.max_seqs, config.schedule.max_tokens
    if seqs != "auto" and step != "auto" and step < seqs:
        raise ConfigError(f"schedule.max_tokens: expected at least schedule.max_seqs ({seqs}), got {step}")
    least, tp = config.parallel.async_tp_min_tokens, config.parallel.tp
    if least not in ("auto", 0) and (tp == 1 or config.model.device == "simulated"):
        missing = "parallel.tp of at least 2" if tp == 1 else "a device that computes"
        raise ConfigError(f"parallel.async_tp_min_tokens={least}: needs {missing}; use auto or 0")
    if config.schedule.group_min_seqs == 1:
        raise ConfigError("schedule.group_min_seqs: expected 0 for none, or at least 2, got 1")
    if config.model.device != "simulated" and config.simulated != SimulatedConfig():
        raise ConfigError("simulated: its keys need model.device=simulated")
    if config.parallel.pp == 1 and config.parallel.pp_micro_batches != "auto":
        raise ConfigError("parallel.pp_micro_batches: needs parallel.pp above 1, or auto")
    backend = config.attention.backend
    if backend in ("triton", "flashinfer") and config.model.device in ("cpu", "simulated"):
        raise ConfigError(f"attention.backend={backend}: needs model.device=cuda, got {config.model.device}; use auto")
    if backend == "flashinfer" and config.model.dtype == "float32":
        raise ConfigError("attention.backend=flashinfer: expected model.dtype bfloat16 or float16; use auto or triton")
    _check_cluster(config)
    if config.model.batch_invariant:
        _check_batch_invariant(config)
    if not config.model.path:
        raise ConfigError("model.path: expected a model directory, a hub id, or demo, got ''")


def _check_cluster(config: Config) -> None:
    """Refuses stages that machines cannot divide: ranks of one stage talk after every layer, so they stay together."""
    nodes, parallel = config.cluster.nodes, config.parallel
    if nodes == 1 and config.cluster != ClusterConfig():
        raise ConfigError("cluster: its keys need cluster.nodes above 1")
    if nodes > 1 and not config.cluster.address:
        raise ConfigError(f"cluster.nodes={nodes}: needs cluster.address, such as tcp://10.0.0.1:10212")
    if parallel.pp % nodes:
        raise ConfigError(
            f"parallel.pp={parallel.pp}: expected a multiple of cluster.nodes={nodes}, since every machine has equally "
            f"many stages; parallel.tp={parallel.tp} divides a stage within its machine"
        )


def _check_batch_invariant(config: Config) -> None:
    """Refuses what computes a row in different ways, depending on the other rows of a step.

    Also refuses graphs of steps with prompts, as the attention that computes rows alike cannot be captured in them.
    """
    refused: dict[str, tuple[object, tuple[object, ...]]] = {
        "model.fp32_logits": (config.model.fp32_logits, (False,)),
        "attention.backend": (config.attention.backend, ("auto", "reference", "triton")),
        "schedule.group_min_seqs": (config.schedule.group_min_seqs, ("auto", 0)),
        "parallel.async_tp_min_tokens": (config.parallel.async_tp_min_tokens, ("auto", 0)),
        "graphs.max_tokens": (config.graphs.max_tokens, ("auto", 0)),
    }
    for key, (value, (*others, last)) in refused.items():
        if value not in (*others, last):
            uses = " or ".join(filter(None, (", ".join(map(str, others)), format_value(last))))
            raise ConfigError(f"{key}={format_value(value)}: not with model.batch_invariant; use {uses}")
