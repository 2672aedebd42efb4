"""Carries messages between processes: their encoding, and ZeroMQ sockets."""
