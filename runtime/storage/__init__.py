"""Bytes of experts from disk into memory."""
