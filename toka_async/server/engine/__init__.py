"""The server's end of the schedulers: running requests, replicas, metrics."""
