"""Benchmarks. The head of each script says which question it answers, docs/benchmarks.md shows results."""
