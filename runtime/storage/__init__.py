"""Read experts from disk into memory."""
