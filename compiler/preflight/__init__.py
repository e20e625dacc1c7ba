"""Checks that refuse a compile before any work."""
