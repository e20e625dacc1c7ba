"""Bundles on disk: their files, and bundles packed into one file."""
