"""Kernels are interpreted where there is no GPU: decided here, before any test module imports one.

No example of a property has a deadline: how long one takes says how busy the machine is. SIGHUP has its default, also
under nohup, whose children would ignore it.
"""

from __future__ import annotations

import signal

from hypothesis import settings

from tests.fakes.triton_interpreter import interpret_kernels

interpret_kernels()
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("no-deadline", parent=settings(), deadline=None)
settings.load_profile("no-deadline")
