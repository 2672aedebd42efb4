"""Builds the runner of a rank: device, weights, cache, attention, warm-up."""
