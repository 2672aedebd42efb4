"""Adapters for trainers that have a place for an engine of one's own. Their packages are loaded only where used."""
