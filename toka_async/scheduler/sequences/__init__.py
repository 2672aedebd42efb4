"""The state of waiting prompts and running sequences."""
