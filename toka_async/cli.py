"""The command `toka-async`. Errors of the user are one line on standard error and exit code 2, never a stack trace.

Imports the engine only where a command needs it, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from toka_async import __version__
from toka_async.bench.commands import add_benchmarks, run_benchmark
from toka_async.config import Config, ConfigError, Field, describe, load_config

KEYS_TITLE = "configuration, as section.key=value or in [section]s of a TOML file"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    options = _parse(arguments)
    try:
        return _run(options)
    except ConfigError as error:
        return _wrong(error)
    except KeyboardInterrupt:
        return _wrong("interrupted", code=130)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output is gone; Python would complain at exit
        return 1


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "serve":
            return _serve(load_config(options.config, options.overrides))
        case "batch":
            return _batch(options)
        case "plan":
            return _plan(options)
        case "config":
            return _config(options)
        case "ping":
            return _ping(options)
        case "keys":
            return _keys(options)
        case "bench":
            return run_benchmark(options)
        case _:
            print(f"toka-async {__version__}")
            return 0


def _serve(config: Config) -> int:
    from toka_async.launch import serve
    from toka_async.model.spec import ModelError

    try:
        return serve(config)
    except ModelError as error:
        return _wrong(error)


def _batch(options: argparse.Namespace) -> int:
    from toka_async.batch_run import BatchError, run
    from toka_async.model.spec import ModelError

    try:
        config = load_config(options.config, options.overrides)
        return run(config, options.input, options.output, options.errors, retry=options.retry_failed)
    except (ModelError, BatchError) as error:
        return _wrong(error)


def _plan(options: argparse.Namespace) -> int:
    from toka_async.model.spec import ModelError
    from toka_async.plan import GIB, device_memory, make_plan, plan_lines

    config = load_config(options.config, options.overrides)
    memory = device_memory() if options.gpu_memory is None else int(options.gpu_memory * GIB)
    if memory is None:
        return _wrong("there is no GPU here: say how much memory one has, with --gpu-memory GIB")
    try:
        print("\n".join(plan_lines(make_plan(config, memory))))
    except ModelError as error:
        return _wrong(error)
    return 0


def _ping(options: argparse.Namespace) -> int:
    from toka_async.ping import PingError, ping

    server = load_config(options.config, options.overrides).server
    url = options.url or f"{'https' if server.tls_cert else 'http'}://{server.host}:{server.port}"
    key = os.environ.get("TOKA_API_KEY", "")
    try:
        for piece in ping(url, options.prompt, chat=options.chat, max_tokens=options.max_tokens, key=key):
            print(piece, end="", flush=True)
        print()
    except PingError as error:
        return _wrong(error, code=1)
    return 0


def _keys(options: argparse.Namespace) -> int:
    from toka_async.transport.curve import KeyFileError, make_keys

    try:
        for path in make_keys(options.folder, options.name):
            print(path)
    except KeyFileError as error:
        return _wrong(error)
    return 0


def _config(options: argparse.Namespace) -> int:
    fields = describe(load_config(options.config, options.overrides))
    print("\n".join(_markdown(fields) if options.markdown else _table(fields)))
    return 0


def _wrong(error: Exception | str, *, code: int = 2) -> int:
    print(f"toka-async: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _table(fields: Iterable[Field]) -> list[str]:
    """One line a key: key=value, then meaning and type."""
    rows = [(f"{field.key}={field.default}", f"{field.meaning} [{field.type}]") for field in fields]
    width = max(len(left) for left, _ in rows)
    return [f"{left:{width}}  {right}" for left, right in rows]


def _markdown(fields: Iterable[Field]) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        default = f"`{field.default}`" if field.default else ""
        lines.append(f"| `{field.key}` | {field.type} | {default} | {field.meaning} |")
    return lines


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"toka-async: {message} (see {self.prog} --help)\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, with overrides also after options, where argparse leaves them over."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unknown argument {rest[0]!r}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    keys = "\n".join([f"{KEYS_TITLE}:", *(f"  {line}" for line in _table(describe()))])
    parser = _Parser(
        prog="toka-async",
        description="An LLM inference engine for high-throughput work.",
        epilog=keys,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"toka-async {__version__}")
    command = _adder(parser, "command", keys)
    _add_configuration(command("serve", "serve a model over HTTP until SIGTERM or SIGINT"))
    _add_batch(_adder(command("batch", "work on files of requests, without a server"), "action", keys))
    plan = command("plan", "show what would go on which GPU, without starting anything")
    plan.add_argument("--gpu-memory", type=_positive, metavar="GIB", help="of each GPU; default: of the one here")
    _add_configuration(plan)
    config = command("config", "show every configuration key, its type, value and meaning")
    config.add_argument("--markdown", action="store_true", help="as a Markdown table")
    _add_configuration(config)
    pair = command("keys", "make a pair of keys for direct submission: NAME.key is public, NAME.key_secret is not")
    pair.add_argument("name", type=_name)
    pair.add_argument("--folder", type=Path, default=Path(), help="where to write them; default: here")
    ping = command("ping", "ask a running server and print its answer as it comes; TOKA_API_KEY is its key")
    ping.add_argument("prompt")
    ping.add_argument("--chat", action="store_true", help="as a user's chat message, not as text to complete")
    ping.add_argument("--max-tokens", type=int, metavar="N", help="of the answer; default: 256, in a chat what fits")
    ping.add_argument("--url", help="of the server, such as http://127.0.0.1:10210; default: from the configuration")
    _add_configuration(ping)
    add_benchmarks(_adder(command("bench", "measure"), "benchmark", ""))
    command("version", "print the version")
    return parser


def _add_batch(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    run = add("run", "answer every line of a file, as OpenAI's batches have them; after a stop, go on where it was")
    run.add_argument("-i", "--input", type=Path, required=True, metavar="IN.jsonl", help="one request a line")
    run.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.jsonl", help="one answer a line")
    run.add_argument("-e", "--errors", type=Path, metavar="ERR.jsonl", help="failed lines; default: OUT.errors.jsonl")
    run.add_argument("--retry-failed", action="store_true", help="ask lines again that failed in an earlier run")
    _add_configuration(run)


def _name(text: str) -> str:
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file")
    return text


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number


def _adder(parser: argparse.ArgumentParser, what: str, epilog: str) -> Callable[[str, str], argparse.ArgumentParser]:
    """Gives the parser subcommands; what is returned adds one, by its name and meaning."""
    commands = parser.add_subparsers(dest=what, required=True, metavar=what)

    def add(name: str, meaning: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=meaning, description=meaning, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    return add


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="configuration file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override keys of the file")


if __name__ == "__main__":
    sys.exit(main())
