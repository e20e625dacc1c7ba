"""Predict a run on a device that is not available."""
