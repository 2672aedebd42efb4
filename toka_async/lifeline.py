"""A server's lifeline: a descriptor whose end means that whoever started the server has ended.

The server and every process of it then end at once, whatever they do: children never outlive their parent
(`supervisor.Child`).
"""

from __future__ import annotations

import logging
import os
import select
import threading
from contextlib import suppress

from toka_async.config import ConfigError
from toka_async.logs import say


def watch_lifeline(fd: int) -> None:
    """End this process, with exit code 1, at the end of `fd`. What can be read from it is dropped.

    Raises ConfigError if the descriptor is not open.
    """
    try:
        os.fstat(fd)
    except OSError:
        raise ConfigError(f"--lifeline: there is no open descriptor {fd}") from None
    threading.Thread(target=_end_with, args=(fd,), name="lifeline", daemon=True).start()


def _end_with(fd: int) -> None:
    poll = select.poll()  # the starter may have made the descriptor non-blocking
    poll.register(fd, select.POLLIN)
    with suppress(OSError):  # a terminal that is gone, or nothing that can be read
        while True:
            poll.poll()
            with suppress(BlockingIOError):
                if not os.read(fd, 65536):
                    break
    say("ended at once: the lifeline was closed", logging.ERROR)
    os._exit(1)
