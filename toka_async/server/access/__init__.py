"""Decides who may use the server, and logs requests and errors."""
