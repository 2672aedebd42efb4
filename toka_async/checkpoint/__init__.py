"""Reads the files of a model: shape, defaults, limits. Free of torch."""
