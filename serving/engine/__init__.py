"""One thread that owns an engine and runs many requests at once."""
