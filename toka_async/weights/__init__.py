"""New weights for the model of a rank, in place, while it serves."""
