"""How tensors get from a trainer into the ranks: groups, shared memory, and the wire formats. For both ends."""
