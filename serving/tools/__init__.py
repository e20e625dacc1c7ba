"""Calls of tools in what a model writes, in the form of its chat template."""
