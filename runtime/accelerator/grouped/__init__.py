"""Experts of a layer by Triton, all at once. Only `bounds.py` can be imported without torch and Triton."""
