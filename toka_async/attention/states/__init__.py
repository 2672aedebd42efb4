"""Layers with a recurrent state: the states of sequences, and what computes with them."""
