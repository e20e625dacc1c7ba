"""Measure the cost and the speed of lossy modes."""
