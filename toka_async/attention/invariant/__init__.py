"""Attention that gives a token the same bits in every batch."""
