"""Runs the lines of batches as requests to the engine."""
