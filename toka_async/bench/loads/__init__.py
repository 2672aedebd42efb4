"""The requests that benchmarks send, and the server under test."""
