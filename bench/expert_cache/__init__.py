"""Eviction, prefetching and the implementations of the expert cache."""
