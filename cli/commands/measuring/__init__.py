"""Commands that measure a bundle, and simulate and tune its runs."""
