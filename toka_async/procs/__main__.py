"""The entry point of every child: `python -m toka_async.procs NAME`, with its spec on standard input.

The name is for process lists. A role's module is imported only after the lifeline is up, since torch takes seconds.
"""

from __future__ import annotations

import logging

from toka_async.procs.child import ParentLink, connect_parent


def main() -> None:
    link = connect_parent()
    try:
        run(link)
    except Exception as error:
        logging.getLogger("toka_async").exception("stopped by an error")
        link.fatal(f"{type(error).__name__}: {error}")
    link.exit()


def run(link: ParentLink) -> None:
    match link.spec.role:
        case "server":
            from toka_async.procs import server

            server.run(link)
        case "batch":
            from toka_async.procs import batch

            batch.run(link)
        case "coordinator":
            from toka_async.procs import coordinator

            coordinator.run(link)
        case "node":
            from toka_async.procs import node

            node.run(link)
        case "scheduler":
            from toka_async.procs import scheduler

            scheduler.run(link)
        case "rank":
            from toka_async.procs import rank

            rank.run(link)


if __name__ == "__main__":
    main()
