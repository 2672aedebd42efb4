"""Attention backends over the paged KV cache, and the choice of the fastest."""
