"""The unquantized model in torch."""
