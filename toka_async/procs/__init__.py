"""The entry point of each child process; wires the other folders together."""
