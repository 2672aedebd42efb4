"""Kernels are interpreted where there is no GPU: decided here, before any test module imports one."""

from __future__ import annotations

from tests.triton_interpreter import interpret_kernels

interpret_kernels()
