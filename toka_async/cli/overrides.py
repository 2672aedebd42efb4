"""Translates every way to write an override to `section.key=value`: options, other engines' names, a bare model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from toka_async.cli.habits import ASSIGNMENTS, OPTIONS, Habit
from toka_async.config import ConfigError
from toka_async.config.load import check_renamed, is_flag, list_keys

TRUTHS = ("true", "false")


def translate_options(arguments: Sequence[str], own: Collection[str] = ()) -> list[str]:
    """Translate `--section.key value` and other engines' options into overrides; other arguments stay.

    own: options of the command itself. Raises ConfigError for an option that has no key here.
    """
    rest = list(arguments)
    translated: list[str] = []
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*translated, argument, *rest]
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") and "." not in name else name
        if argument.startswith("-") and name not in own and (habit := _find_habit(name)) is not None:
            if not habit.key:
                raise ConfigError(f"{name}: {habit.answer}")
            if not equals:
                value = habit.value or _take_value(name, habit, rest)
            translated.append(habit.assignment(value))
        else:
            translated.append(argument)
    return translated


def _find_habit(name: str) -> Habit | None:
    if name.startswith("--") and "." in name:
        check_renamed(key := name.removeprefix("--"))
        return Habit(key)
    return OPTIONS.get(name)


def _take_value(name: str, habit: Habit, rest: list[str]) -> str:
    """Take the next argument. A true-or-false option may come without one, and is then true."""
    if is_flag(habit.key):
        return rest.pop(0).lower() if rest and rest[0].lower() in TRUTHS else "true"
    if not rest or rest[0].startswith("--"):  # an option is not taken for a value
        raise ConfigError(f"{name}: expected a value, as in {name}=VALUE")
    return rest.pop(0)


def complete_overrides(words: Sequence[str], *, has_model: bool) -> list[str]:
    """Translate words to `section.key=value`: Tokasaurus's names, and the first bare word as the model.

    has_model: a bare word may be the model. Raises ConfigError.
    """
    return list(_complete(words, has_model=has_model))


def _complete(words: Sequence[str], *, has_model: bool) -> Iterator[str]:
    model = ""
    for word in words:
        name, equals, value = word.partition("=")
        check_renamed(name)
        if equals and (habit := ASSIGNMENTS.get(name)) is not None:
            if not habit.key:
                raise ConfigError(f"{name}: {habit.answer}")
            yield habit.assignment(value)
        elif equals or not has_model or name in list_keys() or not word:
            yield word  # load_config reports what is wrong with it
        elif model:
            raise ConfigError(f"{word!r}: the model is {model!r} already; expected section.key=value")
        elif word.endswith(".toml") and Path(word).is_file():
            raise ConfigError(f"{word!r} is a configuration file: use --config {word}")
        else:
            model = word
            yield f"model.path={word}"
