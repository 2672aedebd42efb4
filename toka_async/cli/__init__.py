"""The command `toka-async`."""

from toka_async.cli.commands import main

__all__ = ["main"]
