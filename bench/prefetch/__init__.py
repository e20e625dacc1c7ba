"""Measurements of what is read ahead."""
