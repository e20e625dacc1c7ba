"""The memory budget of a run, and the part of it that the expert cache takes."""
