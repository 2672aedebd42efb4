"""The engine from Python without a server: `LLM`, `AsyncLLM`, and what goes in and comes out of them."""
