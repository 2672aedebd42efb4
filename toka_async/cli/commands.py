"""Runs a command. Errors of the user are one line on standard error and exit code 2, never a stack trace.

Imports the engine only where a command needs it, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from toka_async import __version__
from toka_async.bench.commands import run_benchmark
from toka_async.cli.listing import markdown_lines, toml_lines
from toka_async.cli.overrides import complete_overrides
from toka_async.cli.parser import parse_arguments
from toka_async.config import Config, ConfigError, load_config
from toka_async.config.load import describe
from toka_async.listening import url_at

NO_TEXT = "standard input is not text in UTF-8"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    try:
        return _run(parse_arguments(arguments))
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
            return _serve(_configuration(options))
        case "batch":
            return _batch(options)
        case "plan":
            return _plan(options)
        case "config":
            return _config(options)
        case "ping":
            return _ping(options)
        case "chat":
            return _chat(options)
        case "keys":
            return _keys(options)
        case "bench":
            return run_benchmark(options)
        case _:
            print(f"toka-async {__version__}")
            return 0


def _configuration(options: argparse.Namespace) -> Config:
    """Raises ConfigError."""
    return load_config(options.config, complete_overrides(options.overrides, has_model=options.has_model))


def _serve(config: Config) -> int:
    from toka_async.checkpoint.spec import ModelError
    from toka_async.launch import serve

    try:
        return serve(config)
    except ModelError as error:
        return _wrong(error)


def _batch(options: argparse.Namespace) -> int:
    from toka_async.checkpoint.spec import ModelError
    from toka_async.cli.batch_run import BatchFileError, run

    try:
        config = _configuration(options)
        return run(config, options.input, options.output, options.errors, retry=options.retry_failed)
    except (ModelError, BatchFileError) as error:
        return _wrong(error)


def _plan(options: argparse.Namespace) -> int:
    from toka_async.capacity import GIB, device_memory, make_plan, plan_lines
    from toka_async.checkpoint.spec import ModelError

    config = _configuration(options)
    memory = device_memory() if options.gpu_memory is None else int(options.gpu_memory * GIB)
    if memory is None:
        return _wrong("there is no GPU here: say how much memory one has, with --gpu-memory GIB")
    try:
        print("\n".join(plan_lines(make_plan(config, memory))))
    except ModelError as error:
        return _wrong(error)
    return 0


def _ping(options: argparse.Namespace) -> int:
    from toka_async.cli.ask import ask
    from toka_async.cli.ping import PingError, PingQuestion, Server

    server = Server(_url(options), os.environ.get("TOKA_API_KEY", ""))
    try:
        prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    except UnicodeDecodeError:
        return _wrong(NO_TEXT)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    if options.chat or options.system:
        messages.append({"role": "user", "content": prompt})
    question = PingQuestion(
        prompt=prompt,
        messages=messages,
        n=options.n,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        model=options.model,
    )
    try:
        ask(server, question)
    except PingError as error:
        return _wrong(error, code=1)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from toka_async.cli.chat import chat
    from toka_async.cli.ping import PingQuestion, Server

    settings = PingQuestion(
        max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, model=options.model
    )
    try:
        return chat(Server(_url(options), os.environ.get("TOKA_API_KEY", "")), settings, options.system)
    except UnicodeDecodeError:
        return _wrong(NO_TEXT)


def _url(options: argparse.Namespace) -> str:
    """Of the server that is asked."""
    server = _configuration(options).server
    return options.url or url_at(server.host, server.port, "https" if server.tls_cert else "http")


def _keys(options: argparse.Namespace) -> int:
    from toka_async.transport.curve import KeyFileError, make_keys

    try:
        for path in make_keys(options.folder, options.name):
            print(path)
    except KeyFileError as error:
        return _wrong(error)
    return 0


def _config(options: argparse.Namespace) -> int:
    config = _configuration(options)
    if options.markdown:
        print("\n".join(markdown_lines(describe(config))))
        return 0
    resolved = config
    if not options.unresolved:
        from toka_async.checkpoint.spec import ModelError
        from toka_async.cli.resolve import resolve

        try:
            resolved = resolve(config)
        except ModelError as error:
            return _wrong(error)
    print("\n".join(toml_lines(config, resolved)))
    return 0


def _wrong(error: Exception | str, *, code: int = 2) -> int:
    print(f"toka-async: {' '.join(str(error).split())}", file=sys.stderr)
    return code
