"""Grammars that outputs must match: their texts, and the library that matches them."""
