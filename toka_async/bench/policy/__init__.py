"""Compares admission policies through the real scheduler, in simulated time."""
