"""Benchmarks. `README.md` says which script answers which question."""
