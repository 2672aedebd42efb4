"""Rows of data sets as requests, and their answers as columns. pyarrow is loaded only for Parquet and Arrow files."""
