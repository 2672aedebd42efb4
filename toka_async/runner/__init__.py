"""Executes the steps of one rank on its device."""
