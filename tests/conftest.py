"""Kernels are interpreted where there is no GPU: decided here, before any test module imports one.

No example of a property has a deadline: how long one takes says how busy the machine is. SIGHUP and SIGINT have
their defaults, also under nohup and in a shell's background, whose children would ignore them.
"""

from __future__ import annotations

import signal

from hypothesis import settings

from tests.fakes.triton_interpreter import interpret_kernels

interpret_kernels()
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("no-deadline", parent=settings(), deadline=None)
settings.load_profile("no-deadline")
