"""Options of `LLM` as a configuration: our keys, and the names that vLLM has for them.

Nothing is accepted and ignored: an option becomes a key, asks for nothing, or is refused with what to do instead.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from toka_async.cli.habits import NO_COMPILER, NO_DRAFTS, NO_LORA, OPTIONS
from toka_async.config import Config, ConfigError, load_config
from toka_async.config.load import is_flag, is_number, list_keys, list_sections
from toka_async.config.text import format_value

Parser = TypeVar("Parser", bound=argparse._ActionsContainer)

SECTIONS = frozenset(field.name for field in msgspec.structs.fields(Config))
FOREIGN = (  # beginnings of keys for servers that others use
    *("server.host", "server.port", "server.tls", "server.data_dir", "auth."),
    *("zmq.bind", "zmq.key", "zmq.clients", "zmq.insecure"),
)
# Options of vLLM without a counterpart, with the values that ask for nothing. False and empty values do so too.
ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "enable_chunked_prefill": (True,),
    "enable_sleep_mode": (True,),
    "distributed_executor_backend": ("mp",),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "skip_tokenizer_init": (),
    "revision": ("main",),
    "tokenizer_revision": ("main",),
    "code_revision": ("main",),
    "config_format": ("auto", "hf"),
    "hf_token": (True,),
    "hf_overrides": (),
    "hf_config_path": (),
    "rope_scaling": (),
    "rope_theta": (),
    "override_generation_config": (),
    "quantization_config": (),
    "compilation_config": (),
    "optimization_level": (),
    "attention_config": (),
    "kv_cache_memory_bytes": (),
    "swap_space": (4,),
    "offload_group_size": (),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "offload_params": (),
    "scheduling_policy": ("fcfs", "priority"),  # a request's priority always counts
    "async_scheduling": (True,),
    "max_lora_rank": (16,),
    "max_loras": (1,),
    "max_cpu_loras": (),
    "logits_processors": (),
    "structured_outputs_config": ({"backend": "auto"}, {"backend": "guidance"}),
    "spec_method": (),
    "spec_model": (),
    "spec_tokens": (),
    "enable_return_routed_experts": (),
    "return_sampling_mask": (),
    "worker_cls": ("auto",),
    "worker_extension_cls": (),
    "weight_transfer_config": (),
    "kv_transfer_config": (),
    "profiler_config": (),
    "pooler_config": (),
    "limit_mm_per_prompt": (),
    "mm_processor_kwargs": (),
    "allowed_local_media_path": (),
    "allowed_media_domains": (),
    "language_model_only": (),
    "disable_custom_all_reduce": (),
    "disable_cascade_attn": (),
    "use_tqdm_on_load": (True,),
}
INSTEAD: Mapping[str, str] = {  # of "leave it out", for options that the command line does not have
    "tokenizer_revision": "give a directory: tokenizer=DIR, as `hf download --revision` makes it",
    "compilation_config": NO_COMPILER,
    "kv_cache_memory_bytes": 'set cache={"num_tokens": N}, in tokens',
    **dict.fromkeys(("hf_overrides", "rope_theta"), "change config.json in a copy of the model's directory"),
    "rope_scaling": "leave it out: it is read from config.json",
    "override_generation_config": "give SamplingParams",
    "attention_config": "set attention_backend",
    "max_lora_rank": NO_LORA,
    "max_loras": NO_LORA,
    "structured_outputs_config": "leave it out: there is one library for grammars, and no option of it",
    "spec_method": NO_DRAFTS,
    "spec_model": NO_DRAFTS,
}
OURS = {  # unless the user says otherwise
    "log.stats_interval": "0",
    "server.page": "false",
    "server.admin": "true",  # over the socket that only this process uses
    "zmq.buffer_mb": "65536",
}


class EngineArgs:
    """The model and the options of an engine that is started later, as `vars` of this object."""

    model: str

    def __init__(self, model: str, **options: Any) -> None:
        vars(self).update(options, model=model)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Make the arguments of a parsed command line, which must have no options of the script's own."""
        return cls(**vars(args))

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add `--model` and vLLM's other options that are understood here; returns the parser.

        Those that were given are in the parsed arguments, for `LLM(**vars(arguments))`, under the names and with the
        types that vLLM has for them.
        """
        first: dict[str, str] = {}  # of the names of a key: short options are given under it
        for option, habit in OPTIONS.items():
            name = option.lstrip("-").replace("-", "_")
            if option.startswith("--"):
                first.setdefault(habit.key, name)
            else:
                name = first[habit.key]
            # Of options without a key it is not known whether they have values; LLM refuses them.
            form: dict[str, Any] = {"action": "store_true"} if habit.value else {}
            form |= {} if habit.key else {"nargs": "?", "const": True}
            form |= {"type": read_number} if name == "seed" or (not habit.value and is_number(habit.key)) else {}
            text = habit.key or argparse.SUPPRESS
            parser.add_argument(option, dest=name, default=argparse.SUPPRESS, help=text, **form)
        return parser


def read_number(text: str) -> int | float | str:
    """Read a number of a command line. Other text stays as it is: the configuration says what is wrong with it."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def make_config(model: str, config: Path | str | None, options: Mapping[str, Any]) -> Config:
    """Make a configuration of a file, if any, and options.

    Args:
        options: `section={"key": value}`, `"section.key"`, or a name of vLLM's such as `tensor_parallel_size`.

    Raises:
        ConfigError: an option is unknown, not supported or ill-typed; the message names it and the fix.
    """
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model: expected a directory, a hub id or demo, got {model!r}")
    file = None if config is None else Path(config)
    of_file = {override.partition("=")[0] for override in list_overrides(load_config(file))}
    ours = {key: value for key, value in OURS.items() if key not in of_file}
    given = {**ours, "model.path": model, **dict(translate_keywords(options))}
    made = load_config(file, [f"{key}={value}" for key, value in given.items()])
    for override in list_overrides(made):
        if override.startswith(FOREIGN):
            raise ConfigError(f"{override}: LLM's engine is for this process only; use `toka-async serve` for others")
    return made


def translate_keywords(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Translate options to keys and values as text; see `make_config`. None stands for an option that is not given."""
    for name, value in options.items():
        if name in SECTIONS:
            if not isinstance(value, Mapping):
                raise ConfigError(f'{name}: expected its keys, such as cache={{"num_tokens": 65536}}, got {value!r}')
            yield from ((f"{name}.{key}", _format(f"{name}.{key}", each)) for key, each in value.items())
        elif "." in name:
            yield name, _format(name, value)
        elif value is not None:
            yield from _translate(name, value)


def _translate(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Translate an option with a name of vLLM's: to a key and its value, or to nothing."""
    habit = OPTIONS.get(f"--{name.replace('_', '-')}")
    if habit is None and name not in ASKS_NOTHING:
        known = [option.removeprefix("--").replace("-", "_") for option in OPTIONS]
        near = difflib.get_close_matches(name, [*known, *ASKS_NOTHING, *SECTIONS, *list_keys()], n=1)
        hint = f"did you mean {near[0]}?" if near else 'keys are given as cache={"num_tokens": 65536}'
        raise ConfigError(f"unknown option {name!r}; {hint}")
    if habit is None or not habit.key:
        if value and value not in ASKS_NOTHING.get(name, ()):
            answer = INSTEAD.get(name, "not supported; leave it out") if habit is None else habit.answer
            raise ConfigError(f"{name}={value!r}: {answer}")
    elif not habit.value:
        text = str(value).removeprefix("torch.") if name == "dtype" else _format(name, value)
        yield habit.key, habit.words.get(text, text)
    elif value is True:
        yield habit.key, habit.value
    elif value is not False:
        raise ConfigError(f"{name}: expected True or False, got {value!r}")
    elif is_flag(habit.key):
        yield habit.key, "false" if habit.value == "true" else "true"
    else:
        section, _, key = habit.key.partition(".")
        yield habit.key, format_value(getattr(getattr(Config(), section), key))


def _format(name: str, value: Any) -> str:
    """Format a value as text; a list of one is its value, as names of models may be given."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, bool | int | float | str | os.PathLike):
        raise ConfigError(f"{name}: expected one value, got {value!r}")
    return format_value(value)


def list_overrides(config: Config) -> list[str]:
    """List what differs from the defaults, as `section.key=value`."""
    defaults = {name: dict(values) for name, values in list_sections(Config())}
    return [
        f"{section}.{name}={format_value(value)}"
        for section, values in list_sections(config)
        for name, value in values
        if value != defaults[section][name]
    ]
