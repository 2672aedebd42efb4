"""The pages of the KV cache and the prefix tree."""
