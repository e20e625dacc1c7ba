"""MoBiLE: little models."""
