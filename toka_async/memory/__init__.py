"""Memory that is given back and taken again at the same addresses."""
