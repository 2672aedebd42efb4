"""The scheduler of one replica: a sans-IO core over NumPy columns. Loads no torch, no sockets, no event loop."""
