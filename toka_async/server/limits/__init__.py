"""How many requests, tokens and bytes an owner may have, and who waits for room."""
