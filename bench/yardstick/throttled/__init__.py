"""Runs with throttled storage: predictions and lossy modes."""
