"""The server process: HTTP and ZeroMQ in front of the schedulers."""
