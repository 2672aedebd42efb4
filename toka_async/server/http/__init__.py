"""Routes, connections, bodies and responses over HTTP."""
