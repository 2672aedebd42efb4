"""Runs `toka-async` as `python -m toka_async`."""

import sys

from toka_async.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
