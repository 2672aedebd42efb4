from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from toka_async.bench.commands import add_benchmarks

Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def parse() -> Parse:
    """A benchmark's options, as the command line has them."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="benchmark")
    add_benchmarks(lambda name, meaning: commands.add_parser(name, help=meaning))
    return lambda *arguments: parser.parse_args(arguments)
