"""The data of the page at `/`."""
