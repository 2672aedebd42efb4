"""Decides which work may start, and which must make way."""
