"""The benchmarks of `toka-async bench`."""
