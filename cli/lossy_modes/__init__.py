"""Measure what lossy modes cost and bring."""
