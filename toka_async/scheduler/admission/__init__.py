"""What work may start, and what must make way."""
