"""Triton kernels of Gated DeltaNet layers."""
