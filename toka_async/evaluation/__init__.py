"""The engine as a model of evaluation tools. Their packages are loaded only by the modules named after them."""
