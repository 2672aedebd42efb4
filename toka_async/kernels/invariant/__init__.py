"""Kernels whose results for a row are the same bits, whatever other rows are computed with it."""
