"""Copies of pages in E4M3 in the dtype of queries."""
