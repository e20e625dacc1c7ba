"""Refusals before any work."""
