"""Options of a run, and their checks."""
