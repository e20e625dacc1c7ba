"""The memory budget of a run, and the expert cache that fills what is left of it."""
