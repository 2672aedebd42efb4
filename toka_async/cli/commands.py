"""Runs a command. A user's error is one line on standard error and exit code 2, never a stack trace.

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
from toka_async.lifeline import watch_lifeline
from toka_async.listening import make_url
from toka_async.logs import end_with

NO_TEXT = "standard input is not text in UTF-8"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        return _run(parse_arguments(arguments))
    except ConfigError as error:
        return _report_error(error)
    except KeyboardInterrupt:
        return _report_error("interrupted", code=130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has closed the output; Python would complain at exit
        return 1


def _run(options: argparse.Namespace) -> int:
    if getattr(options, "lifeline", None) is not None:
        watch_lifeline(options.lifeline)
    match options.command:
        case "serve":
            return _run_serve(_load_configuration(options))
        case "node":
            return _run_node(options)
        case "warm":
            return _run_warm(_load_configuration(options))
        case "batch":
            return _run_batch(options)
        case "plan":
            return _run_plan(options)
        case "models":
            return _show_models(options)
        case "config":
            return _print_config(options)
        case "ping":
            return _run_ping(options)
        case "chat":
            return _run_chat(options)
        case "keys":
            return _make_keys(options)
        case "bench":
            return run_benchmark(options)
        case _:
            print(f"toka-async {__version__}")
            return 0


def _load_configuration(options: argparse.Namespace) -> Config:
    return load_config(options.config, complete_overrides(options.overrides, has_model=options.has_model))


def _run_serve(config: Config) -> int:
    from toka_async.checkpoint.spec import ModelError
    from toka_async.launch import serve

    try:
        return serve(config)
    except ModelError as error:
        return _report_error(error)


def _run_node(options: argparse.Namespace) -> int:
    """Serve as the leader, or run this machine's agent."""
    from toka_async.nodes.placing import find_place

    place = find_place(options.leader, options.index, options.size, os.environ)
    cluster = [f"cluster.nodes={place.size}", f"cluster.address={place.leader}"] if place.size > 1 else []
    cluster += [f"cluster.interface={options.interface}"] if options.interface else []
    overrides = complete_overrides(options.overrides, has_model=True)
    is_given = options.config is not None or any(not each.startswith("cluster.") for each in overrides)
    # Without a configuration of its own, a machine does not know how many stages there are.
    stages = [] if is_given or not place.index else [f"parallel.pp={place.size}"]
    config = load_config(options.config, [*overrides, *stages, *cluster])
    if place.index == 0:
        return _run_serve(config)
    from toka_async.procs.node import run_agent

    end = run_agent(place, config, options.interface, has_settings=is_given)
    if end.code:
        return _report_error(end.message, code=end.code)
    end_with(f"toka-async: {end.message}")
    return 0


def _run_warm(config: Config) -> int:
    from toka_async.checkpoint.spec import ModelError
    from toka_async.launch import warm

    try:
        return warm(config)
    except ModelError as error:
        return _report_error(error)


def _run_batch(options: argparse.Namespace) -> int:
    from toka_async.checkpoint.spec import ModelError
    from toka_async.cli.batch_rows import has_rows, run_rows
    from toka_async.cli.batch_run import BatchFileError, run

    try:
        config = _load_configuration(options)
        if has_rows(options):
            return run_rows(config, options)
        return run(config, options.input, options.output, options.errors, retry=options.retry_failed)
    except (ModelError, BatchFileError) as error:
        return _report_error(error)


def _run_plan(options: argparse.Namespace) -> int:
    from toka_async.capacity import GIB, device_memory, make_plan, plan_lines
    from toka_async.checkpoint.spec import ModelError

    config = _load_configuration(options)
    memory = device_memory() if options.gpu_memory is None else int(options.gpu_memory * GIB)
    if memory is None:
        return _report_error("this machine has no GPU: give the memory of one with --gpu-memory GIB")
    try:
        print("\n".join(plan_lines(make_plan(config, memory))))
    except ModelError as error:
        return _report_error(error)
    return 0


def _show_models(options: argparse.Namespace) -> int:
    """Returns 2 for a model that would be refused."""
    import msgspec

    from toka_async.checkpoint.json_file import ModelError
    from toka_async.cli.models import list_lines, list_models, report_lines, report_model

    overrides = complete_overrides(options.overrides, has_model=True)
    if options.config is None and not any(each.startswith("model.path=") for each in overrides):
        models = list_models()
        print(msgspec.json.encode(models).decode() if options.json else "\n".join(list_lines(models)))
        return 0
    try:
        report = report_model(load_config(options.config, overrides))
    except ModelError as error:
        return _report_error(error)
    print(msgspec.json.encode(report).decode() if options.json else "\n".join(report_lines(report)))
    return 2 if report.problem else 0


def _run_ping(options: argparse.Namespace) -> int:
    from toka_async.cli.ask import ask
    from toka_async.cli.ping import PingError, PingQuestion, Server

    server = Server(_find_url(options), os.environ.get("TOKA_API_KEY", ""))
    try:
        prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    except UnicodeDecodeError:
        return _report_error(NO_TEXT)
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
        return _report_error(error, code=1)
    return 0


def _run_chat(options: argparse.Namespace) -> int:
    from toka_async.cli.chat import chat
    from toka_async.cli.ping import PingQuestion, Server

    settings = PingQuestion(
        max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, model=options.model
    )
    try:
        return chat(Server(_find_url(options), os.environ.get("TOKA_API_KEY", "")), settings, options.system)
    except UnicodeDecodeError:
        return _report_error(NO_TEXT)


def _find_url(options: argparse.Namespace) -> str:
    server = _load_configuration(options).server
    return options.url or make_url(server.host, server.port, "https" if server.tls_cert else "http")


def _make_keys(options: argparse.Namespace) -> int:
    from toka_async.transport.curve import KeyFileError, make_keys

    try:
        for path in make_keys(options.folder, options.name):
            print(path)
    except KeyFileError as error:
        return _report_error(error)
    return 0


def _print_config(options: argparse.Namespace) -> int:
    config = _load_configuration(options)
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
            return _report_error(error)
    print("\n".join(toml_lines(config, resolved)))
    return 0


def _report_error(error: Exception | str, *, code: int = 2) -> int:
    end_with(f"toka-async: {' '.join(str(error).split())}")
    return code
