"""How kernels are launched."""
