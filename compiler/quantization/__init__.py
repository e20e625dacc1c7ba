"""Formats of weight matrices: codes, scales, bytes."""
