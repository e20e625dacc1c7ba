"""Measurements of `moec serve`."""
