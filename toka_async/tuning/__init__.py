"""Measures once what is fastest on a GPU, and keeps it for later starts."""
