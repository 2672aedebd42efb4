"""Kernels for 8-bit floats with scales."""
