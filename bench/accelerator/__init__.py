"""Experts on an accelerator, measured and simulated."""
