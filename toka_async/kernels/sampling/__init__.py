"""Triton kernels for CUDA, and cuBLASLt. They know tensors only."""
