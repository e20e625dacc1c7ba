"""One pass over the layers of a model."""
