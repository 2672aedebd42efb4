"""Kernels are interpreted where there is no GPU: decided here, before any test module imports one.

One thread is faster for tiny tensors, far so when processes share the cores.

No example of a property has a deadline: how long one takes says how busy the machine is. SIGHUP and SIGINT have
their defaults, also under nohup and in a shell's background, whose children would ignore them.

Ray reports no usage: its threads would go on asking for figures, and log that there are none, during later tests.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.fakes.triton_interpreter import interpret_kernels
from toka_async.logs import LogHandler

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
interpret_kernels()
torch.set_num_threads(1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("no-deadline", parent=settings(), deadline=None)
settings.load_profile("no-deadline")


def pytest_collection_finish() -> None:
    """An engine collects garbage when it starts: it need not look at all that tests and libraries are made of."""
    gc.collect()
    gc.freeze()
    gc.collect()  # how much this leaves decides how often Python collects what lived long


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Takes away what a test's log was written by, so that later tests write nothing to the terminal."""
    levels = {logger: logger.level for logger in (logging.getLogger(), logging.getLogger("toka_async"))}
    yield
    if (handler := LogHandler.find_installed()) is not None:
        logging.getLogger().removeHandler(handler)
    for logger, level in levels.items():
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def draw_the_same_numbers() -> None:
    """Gives a test the same random tensors in each run, so that rounding fails always or never."""
    torch.manual_seed(0)
