"""Commands between stores and devices."""
