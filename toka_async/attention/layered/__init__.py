"""Attention of models whose layers differ in the shape of their heads."""
