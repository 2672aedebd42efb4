"""SGLang's own routes, for trainers that were written for them."""
