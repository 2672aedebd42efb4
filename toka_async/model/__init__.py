"""Decoders, their weights, sampling and tensor parallelism, in torch."""
