"""Figures of the four papers, measured on the examples: `python -m bench.papers`, or `make papers`."""
