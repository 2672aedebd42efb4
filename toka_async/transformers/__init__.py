"""Models whose layers the `transformers` library computes, with our attention, cache, sampling and scheduling."""
