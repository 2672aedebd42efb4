"""The endpoint of direct submission over ZeroMQ."""
