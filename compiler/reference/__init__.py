"""Layers of the unquantized model in torch."""
