"""Gains of the search for a plan, and accuracy of its predictions, on the shipped example."""
