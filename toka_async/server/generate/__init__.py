"""Turns requests into prompts, and token ids into the text of answers."""
