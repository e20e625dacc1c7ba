"""Lossy modes: what may change a result, each opt-in by name. All read the logical cache, so that a run repeats."""
