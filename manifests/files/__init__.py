"""Read untrusted files within bounds, and write files atomically."""
