"""The entry point of every child: `python -m toka_async.procs NAME`, with its spec on standard input.

The name is for process lists. A role's module is imported only after the lifeline is up, since torch takes seconds.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module

from toka_async.procs.child import ParentLink, connect_parent
from toka_async.procs.loading import hold_collections


def main() -> None:
    link = connect_parent()
    try:
        run(link)
    except Exception as error:
        logging.getLogger("toka_async").exception("stopped by an error")
        link.fatal(f"{type(error).__name__}: {error}")
    link.exit()


def run(link: ParentLink) -> None:
    """Run the module that is named like the role."""
    if link.spec.role in ("server", "scheduler"):
        # NumPy's threads for large matrices, of which these have none, spin for a while on each core when they start.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with hold_collections():
        role = import_module(f"toka_async.procs.{link.spec.role}")
    role.run(link)


if __name__ == "__main__":
    main()
