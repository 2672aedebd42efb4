"""The matrices of a model: their parameters in each weight format, what they take, and their products."""
