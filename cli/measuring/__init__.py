"""Run a bundle or a checkpoint and time it."""
