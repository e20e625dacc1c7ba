"""Bounds of the content and cost of a `tokenizer.json`."""
