"""Triton kernels for CUDA. They know tensors only."""
