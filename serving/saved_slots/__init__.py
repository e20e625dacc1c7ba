"""Slots on disk: keys and values of conversations, in files."""
