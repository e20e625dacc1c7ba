"""Stores in OCI registries: a small client of the distribution API, and the layout of bundles on it."""
